"""A parent of one peer: prints its process id, sends it the messages of the arguments, sleeps."""

from __future__ import annotations

import sys
import time

from tests.support.team.team import Team


def main() -> None:
    with Team(1) as team:
        for message in sys.argv[1:]:
            team.send(message)
        print(team.peers[0].pid, flush=True)
        time.sleep(600)


if __name__ == "__main__":
    main()
