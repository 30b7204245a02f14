"""The round, the loop, rows and stopping."""

from selfspec.decoding.decoder import Decoder, decode
from selfspec.decoding.loop import RoundEvent
from selfspec.decoding.requests import Output
from selfspec.decoding.rows import Rows
from selfspec.lookahead import Lookahead

__all__ = ["Decoder", "Lookahead", "Output", "RoundEvent", "Rows", "decode"]
