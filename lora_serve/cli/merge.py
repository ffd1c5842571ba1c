"""`lora-serve merge`: a model with one adapter's delta added to its weights, as a model of its own.

PEFT does the arithmetic, in the checkpoint's dtype, so the merged weights are rounded once more:
their answers are near those of model and adapter, not equal to the bit.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import warnings
from pathlib import Path

from lora_serve.cli.hub import prepare_hub
from lora_serve.errors import AdapterFormatError, AdapterNotFoundError, ConfigError


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
    if args.out.exists():
        raise ConfigError(f"{args.out} exists already; name a directory that does not")
    if not (Path(args.adapter) / "adapter_config.json").is_file():
        raise AdapterNotFoundError(f"No adapter found for {args.adapter}: no adapter_config.json")
    prepare_hub([args.model], None)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.out.parent, prefix=".merge-") as workspace:
        merged = Path(workspace) / "model"
        merge(args.model, args.adapter, merged)
        shutil.move(merged, args.out)
    print(f"merged {args.adapter} into {args.model}: {args.out}")
    return 0


def merge(model: str, adapter: str, out: Path) -> None:
    """Write the merged model and its tokenizer to `out`.

    Raises:
        ConfigError: the model cannot be read.
        AdapterFormatError: the adapter cannot be added to it.
    """
    from peft import PeftModel  # slow to import; not for --help
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        base = AutoModelForCausalLM.from_pretrained(model, dtype="auto", trust_remote_code=False)
        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{model} cannot be read as a model: {error}") from error
    try:
        with warnings.catch_warnings():  # peft asks transformers by a name it is about to drop
            warnings.simplefilter("ignore", FutureWarning)
            warnings.filterwarnings("error", "Found missing adapter keys")  # it would go on
            adapted = PeftModel.from_pretrained(base, adapter)
    except (OSError, ValueError, TypeError, RuntimeError, UserWarning, SafetensorError) as error:
        raise AdapterFormatError(adapter, [f"cannot be added to {model}: {error}"]) from error
    adapted.merge_and_unload(safe_merge=True).save_pretrained(out)
    tokenizer.save_pretrained(out)
