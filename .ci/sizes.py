"""Print how large the package is: lines by folder, its longest files and its fullest folders.

python .ci/sizes.py [PACKAGE]
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path


def main(package: Path) -> None:
    lines = {path: path.read_text(encoding="utf-8").count("\n") for path in package.rglob("*.py")}
    by_folder, by_room, files = Counter[str](), Counter[str](), Counter[Path]()
    for path, count in lines.items():
        by_folder[path.relative_to(package).parts[0]] += count
        by_room[str(path.parent)] += 1
        files[path] = count
    print(f"{'lines':>7}  folder")
    for name, count in by_folder.most_common():
        if (package / name).is_dir():
            print(f"{count:7,}  {package.name}/{name}/")
    print(f"{sum(lines.values()):7,}  {package.name}/ in {len(lines)} files")
    print("longest files:  ", *(f"{path} {count}" for path, count in files.most_common(5)))
    print("fullest folders:", *(f"{path}/ {count}" for path, count in by_room.most_common(5)))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "asyncllm"))
