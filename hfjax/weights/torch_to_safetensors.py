"""Makes a file of safetensors of a .pth: `torch_to_safetensors.py model.pth model.safetensors`.

It needs torch and nothing of hfjax, so that it runs where torch is. The pickle is opened with
weights_only=True, which runs none of its code.
"""

# pyright: reportMissingImports=false

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

WORDS = {
    **{"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "bool": "BOOL"},
    **{f"int{8 * n}": f"I{8 * n}" for n in (1, 2, 4, 8)},
    "uint8": "U8",
}
INNER = ("state_dict", "model", "model_state_dict")  # where a checkpoint may keep the tensors


def tensors_of(held: Any) -> dict[str, Any]:
    """Return the tensors of what a .pth holds, by name, without the prefix of a DataParallel."""
    for name in INNER:
        if isinstance(held, Mapping) and isinstance(held.get(name), Mapping):
            held = held[name]
    found = dict(held) if isinstance(held, Mapping) else {}
    if not found or not all(hasattr(x, "element_size") for x in found.values()):
        raise ValueError(
            f"a state_dict is expected, {{name: tensor}}, or one under {', '.join(INNER)}; the "
            f"file holds {type(held).__name__}. Save model.state_dict() with torch.save."
        )
    wrapped = all(name.startswith("module.") for name in found)
    return {name.removeprefix("module." * wrapped): x for name, x in found.items()}


def written(tensors: Mapping[str, Any], path: Path) -> int:
    """Write tensors as a file of safetensors; return how many bytes it has."""
    import torch

    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, x in tensors.items():
        word = str(x.dtype).removeprefix("torch.")
        if word not in WORDS:
            raise ValueError(f"{name} is {word}: one of {', '.join(WORDS)} is expected.")
        end = at + x.numel() * x.element_size()
        entries[name] = {"dtype": WORDS[word], "shape": list(x.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for x in tensors.values():
            flat = x.detach().cpu().contiguous().reshape(-1)
            file.write(flat.view(torch.uint8).numpy().tobytes())
    return 8 + len(text) + at


def main(words: list[str] | None = None) -> None:
    """Read a .pth and write a file of safetensors; what is there already is not replaced."""
    asks = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    asks.add_argument("pth", type=Path, help="what torch.save wrote: a state_dict")
    asks.add_argument("safetensors", type=Path, help="the new file")
    given = asks.parse_args(words)
    try:
        import torch
    except ImportError:
        sys.exit("torch is not installed here: run this where it is, then bring the new file.")
    try:
        held = torch.load(given.pth, map_location="cpu", weights_only=True)
        size = written(tensors_of(held), given.safetensors)
    except FileExistsError:
        sys.exit(f"{given.safetensors} is there already: nothing is written over it.")
    except Exception as wrong:  # of a pickle anything may be wrong
        sys.exit(f"{given.pth} was not converted: {wrong}")
    print(f"{given.safetensors}: {size} bytes")


if __name__ == "__main__":
    main()
