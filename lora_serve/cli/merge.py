"""`lora-serve merge`: a model with one adapter's delta added to its weights, as a model of its own.

PEFT does the arithmetic, in the checkpoint's dtype, so the merged weights are rounded once more:
their answers are near those of model and adapter, not equal to the bit.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from lora_serve.cli.hub import prepare_hub
from lora_serve.cli.new_directory import check_is_new, new_directory


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "lora-serve merge MODEL ADAPTER OUT"
    parser.description = (
        "Add the delta of a PEFT adapter to the weights of MODEL and save the sum, "
        "with the model's tokenizer, as a model in the directory OUT."
    )
    parser.add_argument("model", metavar="MODEL", help="Directory or hub id of the model.")
    parser.add_argument("adapter", metavar="ADAPTER", help="Directory of the adapter.")
    parser.add_argument("out", metavar="OUT", type=Path, help="Directory to make; must not exist.")
    parser.set_defaults(run=run_merge, parser=parser)


def run_merge(args: argparse.Namespace) -> int:
    """Leaves either the whole model in OUT, or nothing."""
    # slow to import; not for --help
    from lora_serve.cli.peft_model import check_is_adapter, refuse_activated

    check_is_new(args.out)
    check_is_adapter(args.adapter)
    refuse_activated(args.adapter)
    prepare_hub([args.model], None)
    with new_directory(args.out) as merged:
        merge(args.model, args.adapter, merged)
    print(f"merged {args.adapter} into {args.model}: {args.out}")
    return 0


def merge(model: str, adapter: str, out: Path) -> None:
    """Write the merged model and its tokenizer to `out`.

    Raises:
        ConfigError: the model cannot be read.
        AdapterFormatError: the adapter cannot be added to it.
    """
    from transformers import AutoTokenizer

    from lora_serve.cli.peft_model import add_adapter, load_base, told_as_model_error

    base = load_base(model)
    with told_as_model_error(model):
        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    adapted = add_adapter(base, adapter, model)
    adapted.merge_and_unload(safe_merge=True).save_pretrained(out)
    tokenizer.save_pretrained(out)
