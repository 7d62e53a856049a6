"""`eagle3pack convert`."""

from __future__ import annotations

from typing import Any

import click

from eagle3pack import console
from eagle3pack.cli.options import ByteSize, FilePath, GroupedCommand, common_options, option_group


def _once(ctx: click.Context, param: click.Parameter, value: tuple[Any, ...]) -> Any:
    """The value of an option that a user may think repeatable: Click itself keeps the last one in silence."""
    if len(value) > 1:
        raise click.BadParameter(f"given {len(value)} times, expected once", ctx, param)
    return value[0] if value else None


@click.command(cls=GroupedCommand)
@click.argument("source")
@click.argument("out", type=click.Path())
@option_group(
    "Heads",
    click.option("--num-kv-heads", type=int, metavar="N", help="Key/value heads of the new draft."),
    click.option(
        "--target", metavar="TARGET", help="Target model; without --num-kv-heads its number is taken."
    ),
    click.option(
        "--method",
        type=click.Choice(["mean", "first", "procrustes", "svd", "als"]),
        default="mean",
        show_default=True,
        help="How the heads of a group become one.",
    ),
    click.option(
        "--metric",
        type=click.Choice(["identity", "norm", "embedding", "calibration"]),
        help="What the closed-form methods take the attention input to look like.  [default: identity; "
        "calibration where there is one]",
    ),
    click.option(
        "--refit-output",
        type=click.Choice(["closed", "ridge", "none"]),
        help="Least squares for o_proj; ridge needs a calibration, and is the default with one.",
    ),
    click.option(
        "--grouping",
        default="contiguous",
        show_default=True,
        metavar="contiguous|similarity|auto|FILE",
        help="Which heads share one; auto asks held-out activations; FILE lists them as JSON: "
        "[[0, 3], [1, 2]].",
    ),
    click.option("--max-distance", type=click.IntRange(1), metavar="N", help="Positions that als looks at."),
)
@option_group(
    "Calibration and healing",
    click.option(
        "--calibrate-with",
        multiple=True,
        callback=_once,
        metavar="PROMPTS",
        help="Let TARGET and SOURCE answer these prompts first, and merge by what the attention reads: a "
        "file, or the word shipped for the prompts that come with this package.",
    ),
    click.option(
        "--endpoint",
        metavar="URL",
        help="A vLLM server that runs already answers those prompts, and gives hidden states "
        "(docs/conversion.md has its command line).",
    ),
    click.option(
        "--calibrate-from",
        type=FilePath(),
        multiple=True,
        callback=_once,
        metavar="FOLDER",
        help="The same on hidden states that a trainer keeps: files of speculators' generate-offline-data "
        "or SpecForge's prepare_hidden_states.py. TARGET is needed where SOURCE shares its embeddings.",
    ),
    click.option(
        "--calibration-tokens",
        type=click.IntRange(64),
        metavar="N",
        help="Tokens of answers to calibrate on, in all.  [default: until the refit has what it can use]",
    ),
    click.option(
        "--save-calibration",
        type=FilePath(),
        metavar="FILE",
        help="Keep what was recorded, for --calibration.",
    ),
    click.option(
        "--calibration",
        type=FilePath(),
        metavar="FILE",
        multiple=True,
        help="Use what --save-calibration kept, on any machine; repeatable: several are put together.",
    ),
    click.option(
        "--heal",
        type=click.IntRange(1),
        metavar="STEPS",
        help="Then train the merged attention, and nothing else, to give SOURCE's output on the calibration.",
    ),
    click.option(
        "--heal-state",
        type=FilePath(),
        metavar="FILE",
        help="Keep there how far --heal came, and go on from there.",
    ),
)
@option_group(
    "Form of the result",
    click.option("--canonical", is_flag=True, help="Write the portable config.json and tensor names."),
    click.option(
        "--layout",
        type=click.Choice(["keep", "midlayer", "layers"]),
        default="keep",
        show_default=True,
        help="Prefix of the first layer's tensors.",
    ),
    click.option("--strip-shared", is_flag=True, help="Leave out what equals the target's (needs --target)."),
    click.option(
        "--shard-size", type=ByteSize(), default="5GB", show_default=True, help="Split files above this."
    ),
)
@option_group(
    "Retraining",
    click.option(
        "--draft-config",
        type=click.Path(),
        metavar="FILE",
        help="config.json of a SOURCE that has none: a training checkpoint.",
    ),
    click.option(
        "--retrain-with",
        type=(click.Choice(["torchspec", "specforge", "speculators"]), FilePath()),
        multiple=True,
        callback=_once,
        metavar="torchspec|specforge|speculators DIR",
        help="Also write in DIR what that framework needs to retrain the new draft.",
    ),
)
@click.option("--overwrite", is_flag=True, help="Replace OUT, and an earlier calibration, if they exist.")
@click.option("--hash-source", is_flag=True, help="Record the sha256 of the source's files too.")
@click.option("--prove", is_flag=True, help="Compare every unchanged byte of the result with the source.")
@click.option("--dry-run", is_flag=True, help="Print the plan and write nothing.")
@click.option("--no-hash", is_flag=True, hidden=True, help="For benchmarks: leave digests null.")
@common_options
def convert(source: str, out: str, as_json: bool, **options: Any) -> None:
    """Turn the MHA draft SOURCE into a GQA one in OUT.

    SOURCE is a folder, hf:ORG/NAME[@REVISION] or ms:ORG/NAME[@REVISION]; the folder may be an iteration of
    TorchSpec's trainer. The method mean, as published,
    averages the key and value heads of each group; als fits keys, values, queries and output projection in
    closed form and keeps far more. Every tensor that the method does not name keeps its bytes, and
    eagle3pack.json beside the weights records what was done.

    \b
    Examples:
      eagle3pack convert ./draft ./draft-gqa --num-kv-heads 4
      eagle3pack convert ./draft ./draft-gqa --num-kv-heads 4 --method als
      eagle3pack convert ./draft ./gqa --target ./target --method als --calibrate-with shipped
      eagle3pack convert ./draft ./gqa --num-kv-heads 4 --method als --calibrate-from ./hidden_states
      eagle3pack convert ./draft ./gqa --num-kv-heads 4 --method als --calibration FILE --heal 300
      eagle3pack convert hf:org/draft ./draft-gqa --target org/target --strip-shared
      eagle3pack convert ./draft ./draft-gqa --num-kv-heads 4 --retrain-with torchspec ./retrain
    """
    from eagle3pack.convert.command import ConvertOptions, run_convert

    result = run_convert(source, out, ConvertOptions(**options), say=console.say, progress=console.progress)
    if as_json:
        console.print_json(result.as_json())
    else:
        console.say(result.as_text())
    for warning in result.warnings:
        console.warn(warning)
