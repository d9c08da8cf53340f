"""What is installed works: `.ci/run package` runs this outside of the clone."""

import importlib.metadata
import pathlib
import re
import sysconfig


def main() -> None:
    """Import from where packages are installed, and run the programs of the README."""
    import optax_lossscale as ls

    package = pathlib.Path(ls.__file__).parent
    assert package.parent == pathlib.Path(sysconfig.get_path("purelib")), package
    assert (package / "py.typed").is_file()
    assert importlib.metadata.version("optax_lossscale") == ls.__version__

    readme = importlib.metadata.metadata("optax_lossscale").get_payload()
    links = r"\]\((?!https://|#)"
    assert not re.search(links, readme), "a link that PyPI cannot follow"
    namespace: dict[str, object] = {}
    for program in re.findall(r"^```python\n(.*?)^```$", readme, re.M | re.S):
        exec(compile(program, "README.md", "exec"), namespace)
    assert ls.was_applied(namespace["opt_state"])
    assert float(str(namespace["loss"])) < 0.3
    print(f"{package}: {ls.__version__} works")


if __name__ == "__main__":
    main()
