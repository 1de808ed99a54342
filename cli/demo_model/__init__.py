"""The demo model: a small checkpoint that ships with the command line, and prompts that suit it."""

from pathlib import Path
from typing import Final

CHECKPOINT: Final = Path(__file__).parent / "checkpoint"
"""Directory of the checkpoint: Hugging Face format, Qwen3 architecture, bfloat16, with tokenizer and chat template."""

DEMO_NAME: Final = "quire-demo"
"""What clients call the model, unless it is given another name."""
