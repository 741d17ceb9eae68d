"""Slurm, Kubernetes and SkyPilot as targets of ``rollmill deploy``."""

PROVIDES = {
    "clusters": {
        "slurm": "extras.clusters.targets:slurm_files",
        "kubernetes": "extras.clusters.targets:kubernetes_files",
        "skypilot": "extras.clusters.targets:skypilot_files",
    }
}
