"""An MCP server over standard input and output, for the tests."""

from __future__ import annotations

from mcp.server import MCPServer

server = MCPServer("words")


@server.tool()
def count(text: str, letter: str) -> int:
    """Count a letter in a text."""
    if len(letter) != 1:
        raise ValueError("give one letter")
    return text.count(letter)


if __name__ == "__main__":
    server.run("stdio")
