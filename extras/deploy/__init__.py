"""``rollmill deploy``: a recipe as containers, launch scripts, a Slurm job, Kubernetes manifests or SkyPilot tasks."""

PROVIDES = {"commands": {"deploy": "extras.deploy.command:deploy"}}
