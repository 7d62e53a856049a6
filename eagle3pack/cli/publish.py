"""`eagle3pack publish`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from eagle3pack import console
from eagle3pack.cli.options import FilePath, GroupedCommand, common_options, option_group

if TYPE_CHECKING:
    from pathlib import Path


@click.command(cls=GroupedCommand)
@click.argument("folder", type=FilePath())
@option_group(
    "What is published, and where",
    click.option(
        "--to", multiple=True, metavar="HUB:ORG/NAME", help="hf:ORG/NAME or ms:ORG/NAME; may be given twice."
    ),
    click.option(
        "--report",
        multiple=True,
        type=FilePath(),
        metavar="FILE",
        help="What verify wrote; may be given again.",
    ),
    click.option(
        "--config",
        type=FilePath(),
        metavar="FILE",
        help="publish.yaml; looked for here and in FOLDER.",
    ),
    click.option(
        "--allow-unverified",
        metavar="REASON",
        help="Publish although verification is not complete; the card shows why.",
    ),
)
@option_group(
    "The repository",
    click.option(
        "--public", is_flag=True, help="Anyone may read the repository; otherwise a new one is private."
    ),
    click.option("--tag", metavar="T", help="Tag the commit."),
    click.option("--pr", is_flag=True, help="Open a pull request (Hugging Face only)."),
    click.option("--replace-card", is_flag=True, help="Replace a README that eagle3pack did not write."),
    click.option("--prune", is_flag=True, help="Delete weights of another draft from the repository."),
)
@option_group(
    "The card",
    click.option("--lang", metavar="en,zh", help="Languages of the card; each hub's own by default."),
    click.option(
        "--render-to",
        type=FilePath(file_okay=False),
        metavar="DIR",
        help="Keep the rendered files.",
    ),
    click.option(
        "--check-card", is_flag=True, help="Only compare README.md in FOLDER with what would be rendered."
    ),
)
@click.option("--dry-run", is_flag=True, help="Check, render and plan; send nothing.")
@click.option("--offline", is_flag=True, help="With --dry-run: ask no hub.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option(
    "--receipt",
    type=FilePath(dir_okay=False),
    default="receipt.json",
    show_default=True,
    metavar="FILE",
    help="Record of what was published.",
)
@common_options
def publish(folder: Path, as_json: bool, **options: Any) -> None:
    """Publish the verified draft in FOLDER with a card made from its reports.

    Both hubs get the same files, each in one commit that is checked by the hub's own hashes. Running the same
    command again sends nothing that is there already, and finishes what was interrupted.

    publish.yaml holds at least name, license and target: its ORG/NAME under huggingface, and for ModelScope
    under modelscope; measured_as too, where verify was given a folder. docs/publishing.md has an example.

    \b
    Examples:
      eagle3pack publish ./draft-gqa --report report.json --to hf:org/draft --to ms:org/draft --dry-run
      eagle3pack publish ./draft-gqa --report report.json --to hf:org/draft --public --tag v1.0
    """
    from eagle3pack.publish.command import PublishOptions, Surroundings, run_publish

    interactive = sys.stdin.isatty() and sys.stderr.isatty()
    around = Surroundings(
        say=console.say,
        warn=console.warn,
        progress=console.progress,
        confirm=(lambda text: click.confirm(text, err=True)) if interactive else None,
        format_bytes=console.format_bytes,
        show_progress=sys.stderr.isatty() and not as_json,
    )
    result = run_publish(folder, PublishOptions(**options), around)
    if as_json:
        console.print_json(result.document)
        return
    for line in () if console.is_quiet() else result.lines:
        console.print_result(line)
