"""Whether a name leads to a model, asked before torch is imported and clients retry (no torch)."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from hetero.errors import ConfigError
from hetero.plan.presets import PRESETS
from hetero.recipes.options import installed

OWN = ("gpt", "tiny-llama", "tiny-gpt2")  # models that need no files
CONFIG = "config.json"
ERRNO = re.compile(r"\[Errno -?\d+\] ")
REACH_SECONDS = 3.0  # until the Hub counts as one that does not answer


def check_reach(name: str) -> None:
    """Refuse a model that is neither here nor on a Hub that answers, before its client retries."""
    if name in OWN or Path(name).is_dir():
        return
    with installed(f"--model {name} needs transformers", other=", or leave --model out"):
        from huggingface_hub import HfApi
        from huggingface_hub import try_to_load_from_cache as cached
        from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError
    try:
        if not isinstance(cached(name, CONFIG), str):
            HfApi().model_info(name, timeout=REACH_SECONDS)
    except HFValidationError as error:
        raise unknown_model(name, "is no name on the Hub") from error
    except RepositoryNotFoundError as error:
        raise unknown_model(name, "is not on the Hub, or is private") from error
    except Exception as error:  # of the HTTP library that the client is built on
        why = ERRNO.sub("", str(error))
        raise unknown_model(name, f"is not here, and the Hub does not answer: {why}") from error


def unknown_model(name: str, problem: str) -> ConfigError:
    """Return the error of a model that cannot be found, with the names that come near."""
    last = name.rpartition("/")[2].lower()
    near = difflib.get_close_matches(last, OWN, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]}?" if near else ""
    if last in PRESETS:
        hint = f"; hetero plan knows it by name, training takes its weights{hint}"
    return ConfigError(
        f"--model {name} {problem}{hint}",
        advice="name a directory with config.json, safetensors and a tokenizer, a model of the"
        f" Hub as organisation/name, or a preset: {', '.join(OWN)}",
    )
