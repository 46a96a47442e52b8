"""The released model's shape, for tests that reproduce published numbers."""

import json
from pathlib import Path

import stepfloor
from stepfloor.config import ModelConfig

_CONFIG = Path(stepfloor.__file__).parent / "shipped" / "full_config.json"
RELEASED = ModelConfig.from_dict(json.loads(_CONFIG.read_text(encoding="utf-8")))
