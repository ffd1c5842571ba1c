"""`lora-serve bench`: measure any OpenAI-compatible server, or a server of its own."""

from __future__ import annotations

import argparse
from pathlib import Path

from lora_serve.bench.workload import CLOSED_LOOP_CONCURRENCY, POPULARITIES, WorkloadSpec
from lora_serve.cli.server_arguments import USER_KEYS, add_key_arguments

MODES = {
    "latency": "one request after another: how long does one take?",
    "throughput": "all requests at once: how many tokens a second come out?",
    "serve": "requests as they come in service: a closed loop, or Poisson arrivals",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Measure any OpenAI-compatible server with a workload drawn from a seed."
    modes = parser.add_subparsers(metavar="MODE", required=True)
    for mode, what in MODES.items():
        one = modes.add_parser(mode, help=what, description=what[0].upper() + what[1:])
        _add_target(one)
        add_workload_arguments(one)
        _add_pace(one, mode)
        _add_results(one)
        one.set_defaults(run=_run, parser=one, mode=mode)


def _run(args: argparse.Namespace) -> int:
    from lora_serve.cli.bench_run import run_bench  # slow to import; not for --help

    return run_bench(args)


def _add_target(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    either = group.add_mutually_exclusive_group(required=True)
    either.add_argument("--url", help="Base URL of a running server.")
    either.add_argument("--model", help="Model to start a lora-serve server with, for this run.")
    group.add_argument("--served-model", metavar="NAME", help="Name the server gives its model; "
                       "asked from it if left out.")  # fmt: skip
    add_key_arguments(parser, group, (*USER_KEYS, "OPENAI_API_KEY"))
    group.add_argument("--serve-args", nargs=argparse.REMAINDER, default=[], metavar="ARG",
                       help="With --model: the rest of the line goes to `lora-serve serve`."
                       )  # fmt: skip


def add_workload_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of a workload, as `bench_run.workload_spec` takes them."""
    spec = WorkloadSpec()
    group = parser.add_argument_group("workload, lengths in tokens")
    source = group.add_mutually_exclusive_group()
    source.add_argument("--workload", type=Path, metavar="FILE", help="Replay a saved workload.")
    source.add_argument("--seed", type=int, default=spec.seed, help="(default: %(default)s)")
    for flag, default, what in (
        ("--num-requests", spec.num_requests, "Requests to send."),
        ("--input-len", spec.input_tokens, "Each prompt's own tokens."),
        ("--output-len", spec.output_tokens, "Tokens to generate for each."),
        ("--shared-prefix-len", spec.shared_prefix_tokens, "Tokens that prompts share."),
        ("--num-prefixes", spec.num_prefixes, "Different shared prefixes."),
        ("--vocab-size", spec.vocab_size, "Prompt tokens are drawn from ids below this."),
    ):
        group.add_argument(
            flag, type=int, default=default, metavar="N", help=f"{what} (default: %(default)s)"
        )
    group.add_argument("--length-spread", type=float, default=spec.length_spread, metavar="X",
                       help="Draw lengths from 1-X to 1+X of those. (default: %(default)s)"
                       )  # fmt: skip
    group.add_argument("--adapters", nargs="+", default=[], metavar="NAME",
                       help="Adapters to spread the requests over, most popular first; "
                       "`all` takes those that the server lists.")  # fmt: skip
    group.add_argument("--popularity", choices=POPULARITIES, default=spec.popularity,
                       help="How often each adapter is asked for. (default: %(default)s)"
                       )  # fmt: skip
    group.add_argument("--zipf-exponent", type=float, default=spec.zipf_exponent, metavar="S",
                       help="With zipf: the k-th adapter is asked for in proportion to k^-S. "
                       "(default: %(default)s)")  # fmt: skip
    group.add_argument("--prefix-seed", type=int, metavar="N",
                       help="Seed of the shared prefixes, if it is not --seed: run twice with one "
                       "prefix seed, and the second run finds them cached.")  # fmt: skip
    group.add_argument("--save-workload", type=Path, metavar="FILE", help="Write it, for replay.")


def _add_pace(parser: argparse.ArgumentParser, mode: str) -> None:
    group = parser.add_argument_group("pace")
    parser.set_defaults(request_rate=None, max_concurrency=1 if mode == "latency" else None)
    if mode == "serve":
        group.add_argument("--request-rate", type=float, metavar="X",
                           help="Requests a second, as a Poisson process; a closed loop if left "
                           "out.")  # fmt: skip
        group.add_argument("--max-concurrency", type=int, metavar="N",
                           help="Most requests running at once. (default: "
                           f"{CLOSED_LOOP_CONCURRENCY} in a closed loop)")  # fmt: skip
    group.add_argument("--num-warmups", type=int, default=1, metavar="N",
                       help="Requests sent before the measured ones. (default: %(default)s)"
                       )  # fmt: skip


def add_goodput_argument(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--goodput", nargs="+", default=[], metavar="KEY:MS",
                       help="Count the requests within these limits in milliseconds, such as "
                       "ttft:500 tpot:50 e2el:9000.")  # fmt: skip


def _add_results(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("results")
    add_goodput_argument(group)
    group.add_argument("--json", type=Path, metavar="FILE", help="Write everything measured.")
    group.add_argument("--plot", type=Path, metavar="FILE",
                       help="Draw latencies as .png or .svg; needs lora-serve[bench]."
                       )  # fmt: skip
