"""GSM8K's jsonl files (question, answer that ends with "#### 42") to the parquet file that data.train_files names.

    python prepare_gsm8k.py INPUT.jsonl OUTPUT.parquet

No network. An OUTPUT that is there already is replaced. psrl scores the data source openai/gsm8k by itself.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet

DATA_SOURCE = "openai/gsm8k"
INSTRUCTION = "Work it out step by step. Write the final answer on a line of its own: #### and then the bare number."
NUMBER = re.compile(r"-?\d+(\.\d+)?")


def verl_row(line: bytes, index: int) -> dict[str, Any]:
    """One row in verl's columns. Raises ValueError, a few words, for what is no line of GSM8K."""
    row = json.loads(line)
    for column in ("question", "answer"):
        if not isinstance(row, dict) or not isinstance(row.get(column), str):
            raise ValueError(f"it has no text named {column!r}")
    _, mark, final = row["answer"].rpartition("####")
    ground_truth = final.strip().replace(",", "").removeprefix("$")
    if not mark or not NUMBER.fullmatch(ground_truth):
        raise ValueError("its answer does not end with #### and a number")
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": f"{row['question'].strip()}\n\n{INSTRUCTION}"}],
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": {"index": index, "answer": row["answer"]},
    }


def convert(source: Path, target: Path) -> int:
    """Write `target`, whole or not at all; returns its number of rows. Raises ValueError naming file and line, or OSError."""
    if target.suffix != ".parquet":
        raise ValueError(f"{target} must end with .parquet: psrl goes by the name")
    rows: list[dict[str, Any]] = []
    with source.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                rows.append(verl_row(line, len(rows)))
            except ValueError as error:
                raise ValueError(f"{source} line {number} is not one of GSM8K's: {error}") from error
    if not rows:
        raise ValueError(f"{source} is empty")
    target.parent.mkdir(parents=True, exist_ok=True)
    incoming = target.with_name(f".{target.name}.tmp")
    parquet.write_table(pyarrow.Table.from_pylist(rows), incoming)
    incoming.replace(target)
    return len(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("input", type=Path, metavar="INPUT.jsonl")
    parser.add_argument("output", type=Path, metavar="OUTPUT.parquet")
    args = parser.parse_args()
    try:
        rows = convert(args.input, args.output)
    except (ValueError, OSError) as error:
        print(f"prepare_gsm8k: {error}", file=sys.stderr)
        return 2
    print(f"{args.output}: {rows} prompts")
    return 0


if __name__ == "__main__":
    sys.exit(main())
