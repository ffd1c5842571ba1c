"""transformers with PEFT: what people start from. servers/ has its HTTP."""

from __future__ import annotations

from benchmarks.peers.environment import REPOSITORY, TORCH, Environment
from benchmarks.peers.peer import Deployment, Launch, Limits

TRANSFORMERS = "transformers==5.23.0"
PEFT = "peft==0.21.2"
MODULE = "benchmarks.peers.servers.transformers_server"


class Transformers:
    """`generate`, one request after another."""

    name = "transformers"
    recipe = f"{TRANSFORMERS} {PEFT}"
    notes = f"{TRANSFORMERS}, {PEFT}: `generate`, one request at a time"
    limits = Limits(
        batching="one request at a time",
        adapter_batching="one request at a time",
        many_adapters="keeps every adapter in the model",
        int8="not measured",
        int4="not measured",
    )
    way = "one-by-one"

    def install(self, environment: Environment) -> None:
        environment.pip("--upgrade", "pip")
        environment.pip(TORCH)
        environment.pip(TORCH, TRANSFORMERS, PEFT)

    def prepare(self, environment: Environment, deployment: Deployment) -> None:
        pass

    def launch(self, environment: Environment, deployment: Deployment, port: int) -> Launch:
        adapters = (f"{name}={path}" for name, path in deployment.adapters.items())
        model = str(deployment.checkpoint)
        command = (str(environment.python), "-m", MODULE, model, str(port), self.way, *adapters)
        variables = {
            "OMP_NUM_THREADS": str(deployment.num_threads),
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": str(REPOSITORY),
        }
        return Launch(command=command, variables=variables)


class TransformersBatching(Transformers):
    """The same with transformers' own continuous batching."""

    name = "transformers-batching"
    notes = f"{TRANSFORMERS}: its own continuous batching"
    limits = Limits(
        adapters="knows no adapters",
        many_adapters="knows no adapters",
        int8="not measured",
        int4="not measured",
    )
    way = "batching"
