"""Python functions that tasks ask for, rename, explain and document."""

from . import lists, numbers
from .example import EXAMPLES, Example

__all__ = ["EXAMPLES", "Example", "lists", "numbers"]
