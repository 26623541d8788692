"""Print the project's dependencies, one a line: the image installs them apart from the code, for its own layer."""

import sys
import tomllib
from pathlib import Path

if __name__ == "__main__":
    project = tomllib.loads(Path(sys.argv[1]).read_text())["project"]
    print("\n".join(project["dependencies"]))
