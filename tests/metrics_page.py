"""A page of `/metrics`, held against Prometheus' text format 0.0.4 and its conventions of names."""

from __future__ import annotations

import re

NAME = re.compile(r"finwhale_[a-z][a-z0-9_]*")
SAMPLE = re.compile(r'(finwhale_[a-z0-9_]+)((?:\{(?:[a-z]+="[^"\\\n]*",?)+\})?) ([-+.0-9e]+|\+Inf)')


def check_page(page):
    """Hold a page against the text format and the conventions; return {name: type}."""
    kinds, helped, seen, current = {}, set(), set(), None
    for line in page.splitlines():
        if line.startswith("# HELP "):
            name = line.split()[2]
            assert name not in helped
            assert NAME.fullmatch(name)
            helped.add(name)
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split()
            assert name in helped
            assert name not in kinds
            kinds[name] = kind
            current = name
            # A name ends with _total exactly if it only grows.
            assert (kind == "counter") == name.endswith("_total"), name
            assert kind != "histogram" or name.endswith("_seconds")
        else:
            name, _, _ = SAMPLE.fullmatch(line).groups()
            if kinds[current] == "histogram":
                name = re.sub("_(bucket|sum|count)$", "", name)
            assert name == current, line
            assert (line.rsplit(" ", 1)[0]) not in seen
            seen.add(line.rsplit(" ", 1)[0])
    assert page.endswith("\n")
    assert set(kinds) == helped
    return kinds
