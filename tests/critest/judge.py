#!/usr/bin/env python3
"""Compares what critest found with a list of what it should find.
usage: judge.py REPORT LIST [record]     REPORT: critest's JUnit file; LIST: lines of state (or states, with | between), case and why, with tabs between
Every case is on the list; one that does not pass says why. `record` writes the list anew: known reasons stay, others are a question mark,
which is an error of the next comparison."""

import collections
import pathlib
import sys
import xml.etree.ElementTree

UNKNOWN = "?"


def found(report):
    """Returns the state of each case, by name: passed, failed or skipped; and the first line of why."""
    states, why = {}, {}
    for case in xml.etree.ElementTree.parse(report).iter("testcase"):
        name = case.get("name", "")
        # Set-up of the whole suite, and what is measured only on request.
        if not name.startswith("[It] ") or "benchmark" in name:
            continue
        name = " ".join(name.removeprefix("[It] ").split())
        if name in states:
            sys.exit(f"{report}: two cases are called {name!r}")
        state = case.get("status", "")
        states[name] = state if state in ("passed", "skipped") else "failed"
        text = next((part.get("message") or part.text or "" for part in case if part.tag in ("failure", "error", "skipped")), "")
        why[name] = " ".join(text.split())[:300]
    if not states:
        sys.exit(f"{report}: no case ran")
    return states, why


def listed(path):
    """Returns state and reason of each case of the list."""
    entries = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line or line.startswith("#"):
            continue
        state, name, reason = (*line.split("\t"), "")[:3]
        if not {"passed", "failed", "skipped"}.issuperset(state.split("|")) or name in entries:
            sys.exit(f"{path}:{number}: want state, case and why, each case once: {line!r}")
        if state != "passed" and reason in ("", UNKNOWN):
            sys.exit(f"{path}:{number}: say why {name!r} is {state}")
        entries[name] = (state, reason)
    return entries


def differences(states, why, entries):
    """Returns a sentence for each difference."""
    said = []
    for name in sorted({*states, *entries}):
        now, (wanted, _) = states.get(name), entries.get(name, (None, ""))
        if now in (wanted or "").split("|"):
            continue
        text = f": {why[name]}" if why.get(name) else ""
        if wanted is None:
            said.append(f"not on the list: {name} ({now}{text})")
        elif now is None:
            said.append(f"did not run: {name} (on the list as {wanted})")
        else:
            said.append(f"{name}: {now}, on the list as {wanted}{text}")
    return said


def record(path, states, entries):
    """Writes the list; the comments at its head stay."""
    head = [line for line in (path.read_text() if path.exists() else "").splitlines() if line.startswith("#")]
    lines = []
    for name, state in sorted(states.items(), key=lambda entry: (entry[1], entry[0])):
        old, reason = entries.get(name, (None, ""))
        stays = state in (old or "").split("|")
        why = reason if stays else "" if state == "passed" else UNKNOWN
        lines.append("\t".join([old if stays else state, name, why]).rstrip("\t"))
    path.write_text("\n".join([*head, *lines]) + "\n")


def main():
    if len(sys.argv) not in (3, 4) or sys.argv[3:] not in ([], ["record"]):
        sys.exit(__doc__)
    path = pathlib.Path(sys.argv[2])
    states, why = found(sys.argv[1])
    counts = collections.Counter(states.values())
    print(f"critest: {counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped")
    if sys.argv[3:]:
        try:
            entries = listed(path)
        except FileNotFoundError:
            entries = {}
        record(path, states, entries)
        for name in sorted(why):
            if states[name] != "passed":
                print(f"{states[name]}: {name}: {why[name]}")
        return
    said = differences(states, why, listed(path))
    for line in said:
        print(line)
    if said:
        sys.exit(f"{len(said)} differences from {path}")


if __name__ == "__main__":
    main()
