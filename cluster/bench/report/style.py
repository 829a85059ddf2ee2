"""The report's looks, light and dark."""

from typing import Final

STYLE: Final = """
:root {
  color-scheme: light dark;
  --page: #fbfbfa; --card: #ffffff; --ink: #1c1f23; --faint: #667079; --rule: #e3e5e8;
  --plain: #7a828c; --colocated: #d9730d; --separate: #2563c9; --server: #2563c9;
  --target: #9db4d6; --fuse: #b08bd0; --encode: #e3b341; --transfer: #d64545; --draft: #f0995a; --decode: #6fae7a;
  --wait: #e58c4e;
  --bad: #b42318; --good: #1a7f45; --warn: #9a6700;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #14171a; --card: #1c2024; --ink: #e6e8ea; --faint: #98a1aa; --rule: #30363c;
    --plain: #9aa3ad; --colocated: #f0a35e; --separate: #75a7ff; --server: #75a7ff;
    --target: #55739f; --fuse: #9a78bd; --encode: #d0a53a; --transfer: #e0605f; --draft: #d9824a; --decode: #5f9c6b;
    --wait: #d5743f;
    --bad: #ff8a80; --good: #6fcf97; --warn: #e3b341;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 32px 20px 64px; }
h1 { font-size: 26px; margin: 0 0 4px; } h2 { font-size: 18px; margin: 36px 0 10px; }
p { margin: 6px 0; } .faint { color: var(--faint); }
.card { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; padding: 16px 18px; }
.grid2 { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 460px), 1fr)); gap: 16px; }
.grid2 .card:nth-child(3) { grid-column: 1 / -1; }
.card h3 { font-size: 15px; margin: 0 0 2px; }
ul.findings { margin: 0; padding-left: 20px; } ul.findings li { margin: 3px 0; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: 14px; }
th, td { padding: 6px 8px; border-bottom: 1px solid var(--rule); text-align: right; white-space: nowrap; }
th { color: var(--faint); font-weight: 500; white-space: normal; vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; }
td small { color: var(--faint); }
.status-ok { color: var(--good); } .status-unstable { color: var(--warn); }
.status-failed, .status-incomplete { color: var(--bad); }
.legend { display: flex; flex-wrap: wrap; gap: 4px 16px; font-size: 13px; color: var(--faint); margin-bottom: 6px; }
.legend i { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 6px; }
pre { overflow-x: auto; font-size: 12.5px; line-height: 1.45; margin: 8px 0 0; }
details { margin: 10px 0; } summary { cursor: pointer; }
.plot { width: 100%; height: auto; display: block; }
.plot text { fill: var(--ink); font: 12px system-ui, sans-serif; }
.plot .tick, .plot .axis { fill: var(--faint); } .plot .grid { stroke: var(--rule); }
.line { fill: none; stroke-width: 2; } .dashed { stroke-dasharray: 6 5; }
.point { stroke-width: 2; } .point.open { fill: var(--card); }
.plot .mark.arm-plain { fill: var(--plain); } .plot .mark.arm-colocated { fill: var(--colocated); }
.plot .mark.arm-separate { fill: var(--separate); } .plot .mark.arm-server { fill: var(--server); }
.line.arm-plain, .point.arm-plain { stroke: var(--plain); } .point.full.arm-plain { fill: var(--plain); }
.line.arm-colocated, .point.arm-colocated { stroke: var(--colocated); }
.point.full.arm-colocated { fill: var(--colocated); }
.line.arm-separate, .point.arm-separate { stroke: var(--separate); } .point.full.arm-separate { fill: var(--separate); }
.line.arm-server, .point.arm-server { stroke: var(--server); } .point.full.arm-server { fill: var(--server); }
.part-target { fill: var(--target); } .part-fuse { fill: var(--fuse); } .part-encode { fill: var(--encode); }
.part-transfer { fill: var(--transfer); } .part-draft { fill: var(--draft); } .part-decode { fill: var(--decode); }
.part-wait { fill: var(--wait); }
"""
