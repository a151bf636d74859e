"""The rows of an array in generated C."""


def rows(values):
    line, lines = "   ", []
    for value in values:
        piece = f" {value},"
        if len(line) + len(piece) > 120:
            lines.append(line)
            line = "   "
        line += piece
    return "\n".join(lines + [line])
