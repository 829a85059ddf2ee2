"""The Helm chart: rendered by Helm's own engine, held against what Kubernetes, KubeRay and this code know, and run."""
