"""The package list, which TOML cannot say: `dispatch_tables/` becomes `fastkernels._tables`.

Runs in an isolated environment that holds setuptools alone: imports neither torch nor fastkernels.
"""

from setuptools import find_packages, setup

TABLES = "fastkernels._tables"

setup(
    # A mapping without a list would build a wheel that holds only the tables.
    packages=[*find_packages("src"), TABLES],
    package_dir={"": "src", TABLES: "dispatch_tables"},
    package_data={
        "": ["py.typed", "*.json", "*.jsonl", "README.md"],
        TABLES: ["*/*.toml"],
    },
)
