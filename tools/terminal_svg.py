#!/usr/bin/env python3
"""Renders captured terminal text as an SVG image: tools/terminal_svg.py < text > picture.svg"""
import html
import sys

WIDTH, HEIGHT, LEFT, TOP = 8.4, 18, 16, 28
NO_BREAK_SPACE = "\u00a0"  # browsers collapse runs of plain spaces, whatever xml:space says


def main():
    lines = [line.rstrip("\n") for line in sys.stdin]
    columns = max(len(line) for line in lines)
    width, height = columns * WIDTH + 2 * LEFT, len(lines) * HEIGHT + 2 * TOP
    print(f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}">')
    print('<rect width="100%" height="100%" rx="8" fill="#15181e"/>')
    print('<g font-family="DejaVu Sans Mono, Menlo, Consolas, monospace" font-size="14" fill="#d7dce2">')
    for i, line in enumerate(lines):
        colour = ' fill="#8ec07c"' if line.startswith("$ ") else ""
        if line:
            print(f'<text x="{LEFT}" y="{TOP + (i + 1) * HEIGHT - 5:.0f}" textLength="{len(line) * WIDTH:.1f}"{colour}>'
                  f"{html.escape(line).replace(' ', NO_BREAK_SPACE)}</text>")
    print("</g></svg>")


if __name__ == "__main__":
    main()
