"""What pyproject.toml cannot say: the plans of experiments/ are part of the package, as ness/experiments."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

PLANS = Path(__file__).parent / "experiments"


class WithPlans(build_py):
    """Copies the plans beside the modules, so that `ness table --plan paper-cifar100` works from a wheel."""

    def run(self) -> None:
        """Build as ever, then copy; an editable installation reads experiments/ itself."""
        super().run()
        if not self.editable_mode:
            for plan, copy in self._plans():
                self.mkpath(str(copy.parent))
                self.copy_file(str(plan), str(copy))

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        """The copies too."""
        return [*super().get_outputs(include_bytecode), *(str(copy) for _, copy in self._plans())]

    def _plans(self) -> list[tuple[Path, Path]]:
        return [
            (plan, Path(self.build_lib) / "ness" / "experiments" / plan.name) for plan in sorted(PLANS.glob("*.toml"))
        ]


setup(cmdclass={"build_py": WithPlans})
