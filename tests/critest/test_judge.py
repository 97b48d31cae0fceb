"""What the judge says of a report and a list."""

import contextlib
import io
import pathlib
import sys
import tempfile
import unittest

import judge

REPORT = """<testsuites><testsuite>
<testcase name="[BeforeSuite]" status="passed"/>
<testcase name="[It] one" status="passed"/>
<testcase name="[It] two" status="failed"><failure message="no  more\nbread">at</failure></testcase>
<testcase name="[It] three" status="skipped"><skipped message="skipped - no oven"/></testcase>
<testcase name="[It] benchmark of it" status="skipped"><skipped/></testcase>
</testsuite></testsuites>"""
LIST = "# head\npassed\tone\nfailed\ttwo\tno bread here\npassed|skipped\tthree\tby chance\n"


class Judge(unittest.TestCase):
    def judge(self, listed, *more):
        """Returns what it prints, with the words of its exit, and the list afterwards."""
        with tempfile.TemporaryDirectory() as work:
            report, path = pathlib.Path(work, "report.xml"), pathlib.Path(work, "list")
            report.write_text(REPORT)
            path.write_text(listed)
            out = io.StringIO()
            sys.argv = ["judge.py", str(report), str(path), *more]
            with contextlib.redirect_stdout(out):
                try:
                    judge.main()
                except SystemExit as end:
                    print(end)
            return out.getvalue(), path.read_text()

    def test_a_report_like_the_list_is_right(self):
        said, _ = self.judge(LIST)
        self.assertEqual(said, "critest: 1 passed, 1 failed, 1 skipped\n")

    def test_each_difference_is_named(self):
        for changed, wanted in [
            (LIST.replace("failed\ttwo", "skipped\ttwo"), "two: failed, on the list as skipped: no more bread"),
            (LIST.replace("passed\tone\n", ""), "not on the list: one (passed)"),
            (LIST + "passed\tfour\n", "did not run: four (on the list as passed)"),
            (LIST.replace("no bread here", "?"), "say why 'two' is failed"),
            (LIST.replace("passed\tone", "pased\tone"), "want state, case and why"),
        ]:
            said, _ = self.judge(changed)
            self.assertIn(wanted, said)

    def test_a_record_keeps_known_reasons_and_asks_for_others(self):
        _, recorded = self.judge(LIST.replace("failed\ttwo", "skipped\ttwo"), "record")
        self.assertEqual(recorded, "# head\nfailed\ttwo\t?\npassed\tone\npassed|skipped\tthree\tby chance\n")


if __name__ == "__main__":
    unittest.main()
