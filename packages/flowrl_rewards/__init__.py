"""Rewards by networks that others have trained: CLIP's family, GenEval's detector, OCR.

flowrl finds them by entry points, as it finds those of a third party.
"""

from flowrl import __version__ as __version__
from flowrl_rewards.clip import Aesthetic, ClipFeatures, CLIPScore, HPSv21, PickScore
from flowrl_rewards.geneval import GenEval
from flowrl_rewards.ocr import OCR

__all__ = ["OCR", "Aesthetic", "CLIPScore", "ClipFeatures", "GenEval", "HPSv21", "PickScore"]
