"""`python -m tests.child STATEMENTS`: what a test starts as a child process."""

import sys

exec(sys.argv[1])
