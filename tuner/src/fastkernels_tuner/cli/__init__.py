"""The `fastkernels-tune` command.

Exit status: 0 well, or promoted; 1 healthy, but nothing promoted, or a checked table differs;
2 usage or a source that is no good; 3 the machine does not let us; 4 the time is used up;
5 rejected; 6 inconclusive; 7 the store is corrupt; 8 suspected of cheating; 130 interrupted, to be
resumed.
"""

from __future__ import annotations

from typing import Any

import click

import fastkernels_tuner
from fastkernels_tuner.cli import agents, campaigns, single, stores, tables
from fastkernels_tuner.cli.common import (
    confirm_option,
    device_option,
    folder_option,
    json_option,
    policy_option,
    storage_option,
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, invoke_without_command=True)
@click.version_option(fastkernels_tuner.__version__, prog_name="fastkernels-tune")
@click.option("--op", default=None, help="Tune this operator, e.g. gdn_decode.")
@device_option
@click.option("--route", "routes", multiple=True, help="Only this route; repeatable.")
@click.option("--trials", type=click.IntRange(1), help="Configs per study; default: the policy's.")
@click.option("--wall", type=click.FloatRange(1), help="Stop after so many seconds; resume later.")
@click.option("--seed", default=0, show_default=True)
@click.option("--peer", "peers", multiple=True, help="name=module:function; repeatable.")
@click.option("--dry-run", is_flag=True, help="Say what would be searched, and stop.")
@confirm_option
@policy_option
@folder_option
@storage_option
@json_option
@click.pass_context
def main(context: click.Context, /, **options: Any) -> None:
    """Search, judge and fit an operator's dispatch table: fastkernels-tune --op gdn_decode.

    Without a GPU the same pipeline runs on the CPU routes; its tables are never shipped.
    """
    if context.invoked_subcommand is not None:
        given = [n for n in options if context.get_parameter_source(n) != _DEFAULT]
        if given:
            raise click.UsageError(
                f"--{given[0].replace('_', '-')} before {context.invoked_subcommand!r}: options of"
                " a command come after its name"
            )
        return
    if options["op"] is None:
        click.echo(context.get_help())
        context.exit(2)
    campaigns.tune(**options)


_DEFAULT = click.core.ParameterSource.DEFAULT

for command in (
    campaigns.resume,
    campaigns.status,
    campaigns.promote_command,
    campaigns.report_command,
    campaigns.worker,
    single.numeric,
    single.eval_command,
    single.ab,
    single.verify,
    single.prebuild_command,
    single.doctor,
    stores.export,
    stores.import_command,
    agents.agent,
    agents.init,
    agents.export_route,
    tables.emit_command,
    tables.dispatch_group,
):
    main.add_command(command)

if __name__ == "__main__":
    main()
