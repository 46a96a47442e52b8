"""The released model's shape and the shipped one's, for tests that reproduce published numbers."""

import json
from pathlib import Path

import stepfloor
from stepfloor.config import ModelConfig

_DIRECTORY = Path(stepfloor.__file__).parent / "shipped"
RELEASED = ModelConfig.from_dict(json.loads((_DIRECTORY / "full_config.json").read_text(encoding="utf-8")))
SHIPPED = ModelConfig.load(_DIRECTORY)
