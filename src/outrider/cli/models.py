"""x"""


def models() -> None:
    """b"""
