"""A signal handler that raises, as that of SIGINT does, may do so anywhere: no lock stays locked behind it."""

import subprocess
import sys

import pytest

PROGRAM = """
import os, signal, sys, threading, time
from nsbox import alarm, janitor
from nsbox.stock import Stock

class Struck(BaseException):
    pass

def strike(*_):
    raise Struck

plain = threading.RLock()
condition = threading.Condition(plain)
stock = Stock(lambda: 1, lambda _: None, lambda _: True, size=2)

def enter_condition():
    with condition:
        pass

def give_job():
    janitor.later(lambda: None)

def set_alarm():
    alarm.cancel(alarm.at(time.monotonic() + 60, lambda: None))

def take():
    stock.take()

act, lock = {
    "condition": (enter_condition, lambda: plain),
    "janitor": (give_job, lambda: janitor._lock),
    "alarm": (set_alarm, lambda: alarm._lock),
    "stock": (take, lambda: stock._lock),
}[sys.argv[1]]

def is_free():
    found = []
    def attempt():
        if lock().acquire(timeout=3):
            lock().release()
            found.append(True)
    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()
    return bool(found)

alarm.at(time.monotonic() + 3600, lambda: None)  # the thread starts, and stays
act()
signal.signal(signal.SIGALRM, strike)
for number in range(int(sys.argv[2])):
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.0005)
        while True:
            act()
    except Struck:
        pass
    if not is_free():
        print("locked")
        break
else:
    print("free")
sys.stdout.flush()
os._exit(0)
"""


def outcome(what: str, strikes: int) -> str:
    words = [sys.executable, "-c", PROGRAM, what, str(strikes)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


def test_a_condition_stays_locked() -> None:
    """The control: it is why there is a lock beside each."""
    assert outcome("condition", 200) == "locked"


@pytest.mark.parametrize("what", ["janitor", "alarm", "stock"])
def test_what_users_call_leaves_nothing_locked(what: str) -> None:
    assert outcome(what, 200) == "free"
