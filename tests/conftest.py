"""What every test process needs before its first test."""

import signal

# A shell starts what is in its background with both ignored, and every child would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)
