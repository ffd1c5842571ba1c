"""`python -m lora_serve.dynamo MODEL …`: Dynamo's flags of workers, and those of `serve`."""

from __future__ import annotations

from lora_serve.errors import ConfigError


def main() -> None:
    """Serve until SIGTERM. Exits with a line about what is wrong where it cannot begin."""
    try:
        from dynamo.common.backend.run import run
    except ImportError as error:
        raise SystemExit(
            f"Dynamo is missing ({error}): pip install 'lora-serve[dynamo]'"
        ) from error
    from lora_serve.dynamo.engine import DynamoEngine

    try:
        run(DynamoEngine)
    except ConfigError as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()
