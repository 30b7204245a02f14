"""EAGLE-3's head lives with the drafter that runs it."""

from selfspec.drafters.eagle3_head import Eagle3Head, HeadShape

__all__ = ["Eagle3Head", "HeadShape"]
