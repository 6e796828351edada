import pytest


@pytest.fixture
def drawn(figures, tmp_path):
    """Call a plot function; return its figure after checking that a PNG came out."""

    def draw(function, *given, **words):
        path = tmp_path / "picture.png"
        function(*given, path, **words)
        assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
        # Sizes are known at the resolution drawn last.
        figures[-1].draw_without_rendering()
        return figures[-1]

    return draw
