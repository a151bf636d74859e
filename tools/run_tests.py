#!/usr/bin/env python3
"""Runs the CTest tiers one after another and prints minutes and counts per tier.

The last line is `N passed, N failed, N skipped`. The exit status is 1 if a test failed or could not
be run.
"""
import argparse
import os
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree

TIERS = ["unit", "plan", "ops", "dist", "equiv", "golden", "fault", "cli"]


def run_tier(build, tier, jobs, seconds_left, extra):
    """(passed, failed names, reasons by name of skipped test) of one tier; None if it has no tests."""
    junit = os.path.join(os.path.abspath(build), f"junit-{tier}.xml")
    if os.path.exists(junit):
        os.remove(junit)
    listing = subprocess.run(["ctest", "--test-dir", build, "-N", "-L", f"^{tier}$"] + extra,
                             capture_output=True, text=True)
    names = re.findall(r"^\s*Test\s+#\d+: (\S+)", listing.stdout, re.MULTILINE)
    if not names:
        return None
    command = ["ctest", "--test-dir", build, "-L", f"^{tier}$", "-j", str(jobs), "--output-on-failure",
               "--no-tests=error", "--output-junit", junit] + extra
    try:
        subprocess.run(command, timeout=seconds_left)
    except subprocess.TimeoutExpired:
        print(f"the {tier} tier was stopped: the time limit of --minutes has passed", flush=True)
    passed, failed, skipped, seen = 0, [], {}, set()
    if os.path.exists(junit):
        for case in ElementTree.parse(junit).getroot().iter("testcase"):
            seen.add(case.get("name"))
            status = case.get("status")
            if status == "run":
                passed += 1
            elif (note := case.find("skipped")) is not None and "SKIP_RETURN_CODE" in note.get("message", ""):
                said = re.search(r"^skipped: (.*)", case.findtext("system-out", ""), re.MULTILINE)
                skipped[case.get("name")] = said.group(1) if said else "no reason given"
            else:
                failed.append(case.get("name"))
    failed += [name + " (not run)" for name in names if name not in seen]
    return passed, failed, skipped


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", default="build/release")
    parser.add_argument("--tiers", default=",".join(TIERS))
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--minutes", type=float, default=0.0, help="stop after this time (0: no limit)")
    parser.add_argument("--match", help="only tests whose name matches this expression")
    parser.add_argument("--also", help="of the other tiers, the tests whose name matches this expression")
    options = parser.parse_args()
    tiers = options.tiers.split(",")
    match = {tier: options.match if tier in tiers else options.also for tier in TIERS if tier in tiers or options.also}
    deadline = time.monotonic() + options.minutes * 60 if options.minutes > 0 else None

    rows, all_failed, all_skipped = [], [], {}
    for tier in tiers:
        if tier not in TIERS:
            sys.exit(f"unknown tier '{tier}'; the tiers are {', '.join(TIERS)}")
    for tier in [*tiers, *(tier for tier in match if tier not in tiers)]:
        extra = ["-R", match[tier]] if match[tier] else []
        start = time.monotonic()
        left = None if deadline is None else max(1.0, deadline - start)
        result = run_tier(options.build, tier, options.jobs, left, extra)
        if result is None:
            continue
        passed, failed, skipped = result
        rows.append((tier, passed, len(failed), len(skipped), (time.monotonic() - start) / 60))
        all_failed += failed
        all_skipped.update(skipped)

    print(f"\n{'tier':<8}{'passed':>8}{'failed':>8}{'skipped':>9}{'minutes':>9}")
    for tier, passed, failed, skipped, minutes in rows:
        print(f"{tier:<8}{passed:>8}{failed:>8}{skipped:>9}{minutes:>9.2f}")
    print(f"{'all':<8}{sum(r[1] for r in rows):>8}{len(all_failed):>8}{len(all_skipped):>9}{sum(r[4] for r in rows):>9.2f}")
    for reason in dict.fromkeys(all_skipped.values()):
        print(f"skipped: {', '.join(name for name, own in all_skipped.items() if own == reason)}: {reason}")
    for name in all_failed:
        print(f"failed: {name}")
    print(f"{sum(r[1] for r in rows)} passed, {len(all_failed)} failed, {len(all_skipped)} skipped")
    if not rows:
        sys.exit("no tests were found")
    sys.exit(1 if all_failed else 0)


if __name__ == "__main__":
    main()
