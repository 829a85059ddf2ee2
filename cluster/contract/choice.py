"""One way to allocate one group, and whether it would read what it allocates."""

from dataclasses import dataclass

from cluster.contract.facts import BackendFacts, BlockSize, FormatFacts, GroupFacts
from cluster.contract.geometry import Placed, manager_block_sizes

_ALIASES = {"fp8": "fp8_e4m3"}
"""vLLM has two words for this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What a backend would read otherwise than it is allocated."""

    field: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A group with the backend and the format it would have, on the block table of a group of the target."""

    group: GroupFacts
    backend: BackendFacts
    format: FormatFacts
    mirrors: str
    """The target's group whose table addresses it."""
    target_table: str

    @property
    def block_sizes(self) -> tuple[BlockSize, ...]:
        return manager_block_sizes(self.backend, self.format)

    def placed(self, block_size: int) -> Placed:
        """In its side's pool. Groups of the draft on one table of the target use the same ids at once, so they lie side
        by side in a block; two groups of one engine would overlay each other."""
        return Placed(
            table=self.target_table,
            num_layers=len(self.group.layers),
            block_size=block_size,
            backend=self.backend,
            format=self.format,
            sliding_window=self.group.sliding_window,
        )


def find_fault(backend: BackendFacts, format: FormatFacts) -> Fault | None:
    """Compare what is allocated with what would be read: a row's width, its format, an index table's width."""
    written, read = format.row_bytes, format.read_row_bytes or format.row_bytes
    read_word = format.read_cache_dtype or format.cache_dtype
    if written != read:
        unit = "token" if format.tokens_per_state == 1 else "state"
        words = f"({format.cache_dtype} against {read_word})"
        return Fault(field="row_bytes", text=f"{written} bytes a {unit} allocated, {read} expected {words}")
    if _meaning(format, format.cache_dtype) != _meaning(format, read_word):
        return Fault(field="cache_dtype", text=f"{format.cache_dtype} allocated, {read_word} expected")
    widths = backend.index_widths_read
    if backend.index_width is not None and widths and backend.index_width not in widths:
        read_widths = " or ".join(map(str, sorted(widths)))
        return Fault(field="index_width", text=f"{backend.index_width} indices a token built, {read_widths} read")
    return None


def same_cache_dtype(a: FormatFacts, b: FormatFacts) -> bool:
    """Whether two formats agree, not in the word but in what it stands for: `auto` is the model's dtype."""
    return _meaning(a, a.cache_dtype) == _meaning(b, b.cache_dtype)


def _meaning(format: FormatFacts, word: str) -> str:
    return format.dtype if word == "auto" else _ALIASES.get(word, word)
