"""Task files: one reader per format, and `find_format`, which finds out which one a path is.

    auto_circuit.py    JSON with a "prompts" list
    edge_pruning.py    a DatasetDict folder, saved by datasets' save_to_disk
    json_lines.py      one JSON object per line, with our fields or Edge-Pruning's

A reader turns a file into TaskExamples, in the file's order, and counts what it dropped. It knows no tokenizer.
"""

from swd_lens.tasks.files.auto_circuit import read_auto_circuit
from swd_lens.tasks.files.detect import find_format
from swd_lens.tasks.files.edge_pruning import read_edge_pruning
from swd_lens.tasks.files.json_lines import read_jsonl

__all__ = ["find_format", "read_auto_circuit", "read_edge_pruning", "read_jsonl"]
