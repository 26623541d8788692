"""`gpushare sim`: simulate a cluster's placement, or jobs that share GPUs, before trusting it with real ones."""

import typer

from gpushare.cli import sim_cluster, sim_jobs

app = typer.Typer(no_args_is_help=True)


@app.callback()
def group() -> None:
    """Simulate placement on a cluster, or jobs that share GPUs."""


sim_cluster.register(app)
sim_jobs.register(app)
