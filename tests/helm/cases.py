"""Values under which the chart is tested: those of ci/, and installations that use the rest of it."""

from typing import Any

from tests.helm.chart import CI, ci_values

_MODEL = {"target": "Qwen/Qwen3-8B", "draft": "deepseek-ai/dspark_qwen3_8b_block7"}

_EVERYTHING: dict[str, Any] = {
    "model": _MODEL | {"numSpeculativeTokens": 5},
    "config": {"contract": {"strict": True}, "channel": {"kind": "gloo"}, "gateway": {"limits": {"max_running": 32}}},
    "image": {"pullSecrets": [{"name": "registry"}]},
    "target": {
        "replicas": 3,
        "minReplicas": 1,
        "maxReplicas": 5,
        "image": {"tag": "other"},
        "rdma": {"resource": "rdma/hca", "count": 1},
        "resourceClaims": [{"name": "nic", "resourceClaimTemplateName": "nic"}],
        "nodeSelector": {"pool": "big"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
        "topologySpreadConstraints": [
            {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "DoNotSchedule"}
        ],
        "runtimeClassName": "nvidia",
        "priorityClassName": "high",
        "env": [{"name": "NCCL_DEBUG", "value": "INFO"}],
        "podLabels": {"team": "serving"},
        "podAnnotations": {"note": "big"},
        "rayStartParams": {"object-store-memory": "1000000000"},
    },
    "draft": {"gpus": 3, "replicas": 1},
    "gateway": {
        "tls": {"secretName": "gateway-tls", "clientCa": True},
        "token": {"secretName": "gateway-token", "key": "secret"},
        "service": {"type": "LoadBalancer", "annotations": {"internal": "true"}},
    },
    "modelCache": {"size": "200Gi", "storageClassName": "shared"},
    "huggingFace": {"tokenSecret": {"name": "hub"}},
    "rayToken": {"secretName": "ray-token"},
    "autoscaling": {"enabled": True},
    "gcsFaultTolerance": {"redisAddress": "redis:6379", "passwordSecret": {"name": "redis"}},
    "serviceAccount": {"annotations": {"role": "reader"}},
    "networkPolicy": {"egress": [{"to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}]},
    "monitoring": {"podMonitor": {"enabled": True}, "alerts": {"enabled": True}, "dashboard": {"enabled": True}},
    "kueue": {"queueName": "gpus", "priorityClass": "high", "requiredTopology": "cloud.provider.com/rack"},
}

CASES: dict[str, dict[str, Any]] = {
    **{name: ci_values(name) for name in CI},
    "defaults": {"model": _MODEL},
    "everything": _EVERYTHING,
    "without-draft": {"model": {"target": "Qwen/Qwen3-8B"}, "networkPolicy": {"enabled": False}},
    "shared-gpu": {
        "model": _MODEL,
        "colocate": {"enabled": True, "sharedGpu": True},
        "config": {"channel": {"kind": "cuda_ipc"}},
    },
    "tensor-parallel": {
        "model": _MODEL,
        "target": {"gpus": 2},
        "colocate": {"enabled": True},
        "config": {"engine": {"tensor_parallel_size": 2}},
    },
    "tls": {"model": _MODEL, "gateway": {"tls": {"secretName": "gateway-tls"}}, "up": {"keep": {"enabled": False}}},
    "bench": {
        "mode": "job",
        "model": _MODEL,
        "job": {"command": "bench", "submissionMode": "HTTPMode", "activeDeadlineSeconds": 3600},
        "kueue": {"queueName": "gpus", "preferredTopology": "cloud.provider.com/rack"},
    },
    "cluster-of-your-own": {"mode": "cluster", "model": _MODEL, "rayToken": {"enabled": False}},
}
