"""The program: commands, and how their failures end."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from shoal import __version__
from shoal.cli import admin, execute, files, images, pools, server, sessions, simulate, snapshots
from shoal.cli.output import INTERRUPTED, OURS, Json, emit, explain, reset


class Program(TyperGroup):
    """Ends known failures with a sentence and 125; only bugs of ours show a traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Runs a command."""
        reset()
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            raise typer.Exit(OURS) from None
        except Exception as error:
            if explain(error):
                raise typer.Exit(OURS) from None
            raise


app = typer.Typer(
    cls=Program,
    name="shoal",
    help="Elastic sandboxes for agent training. Commands speak to the service of SHOAL_URL and SHOAL_API_KEY, or of "
    "the credentials file that `shoal up` writes.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("up", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(server.up)
app.command("down")(server.down)
app.command("doctor")(server.doctor)
app.command("run", context_settings={"allow_interspersed_args": False})(execute.run)
app.command("exec", context_settings={"allow_interspersed_args": False})(execute.exec_)
app.command("shell")(execute.shell)
app.command("cp")(files.cp)
app.command("snapshot")(snapshots.snapshot)
app.command("fork")(snapshots.fork)
app.command("logs")(sessions.logs)
app.command("trajectory")(sessions.trajectory)
app.command("simulate")(simulate.simulate)
app.add_typer(sessions.app, name="session")
app.add_typer(snapshots.app, name="snapshots")
app.add_typer(images.app, name="image")
app.add_typer(pools.app, name="pool")
app.add_typer(admin.app, name="admin")


@app.command()
def version(json: Json = False) -> None:
    """Print the version."""
    emit({"version": __version__}, __version__, as_json=json)
