# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Planning under a memory limit
#
# Correlated noise takes back what earlier steps have added, so something of those steps must be kept. This notebook
# shows what that costs, how to tell the planner how much memory there is, and which mechanisms keep next to nothing.
# It trains nothing: a plan needs the size of the model, not the model. It runs in less than a minute.
#
# You need `pip install bandmf`.

# %%
# %matplotlib inline
import os
import tempfile
from pathlib import Path

import bandmf
from bandmf.plots import color, memory, panels

SHORT = os.environ.get("BANDMF_NOTEBOOKS") == "short"  # for a quick check that everything runs

# %% [markdown]
# ## What the noise keeps
#
# The noise has as many numbers as the model has parameters, and they are kept in float32. One such *vector* takes
# 4 bytes for each parameter. With `b` bands, the noise of the last `b - 1` steps is kept. Where there is room, a few
# more vectors make a step faster. If several devices train together, each keeps its share.
#
# As an example take a model of 124 million parameters (GPT-2 small), trained for ten epochs on 100,000 texts.

# %%
PARAMETERS = 124_000_000
budget = {"epsilon": 4, "delta": 1e-6, "examples": 100_000, "batch_size": 2500 if SHORT else 1000, "epochs": 10}
certify = {"certify_seconds": 1.5 if SHORT else 10}  # the time for the proof that balls-in-bins needs
print(f"one vector: {4 * PARAMETERS / 1e9:.3f} GB; on 8 devices: {4 * PARAMETERS / 8 / 1e9:.3f} GB each")


def row(name, plan):
    """A plan in one line."""
    print(
        f"{name:<26} {plan.mechanism:<15} RMSE {plan.rmse:6.2f}  "
        f"{plan.vectors:>3} vectors = {plan.memory / 1e9:5.2f} GB a device"
    )


# %% [markdown]
# ## The paper's mechanism
#
# First without a limit. The plan tries several numbers of bands and takes the best. Few bands are bad because they
# cancel little. Many are bad because an example then takes part at more predictable times, which random batches hide
# less well. DP-SGD is the plan with one band.

# %%
dp_sgd = bandmf.plan(**budget, parameters=PARAMETERS, bands=1)
unlimited = bandmf.plan(**budget, parameters=PARAMETERS, sampling="cyclic-poisson")
row("DP-SGD", dp_sgd)
row("no limit", unlimited)
for candidate in unlimited.candidates:
    print(f"  {candidate.name:>9}: RMSE {candidate.rmse:6.2f}")

# %% [markdown]
# ## A limit
#
# `memory=` is what the noise may take on each device. Nothing has to be calculated by hand: the planner takes as many
# bands as fit, and says what would have been best with more memory.

# %%
limited = bandmf.plan(**budget, parameters=PARAMETERS, sampling="cyclic-poisson", memory="1.5GB")
row("at most 1.5 GB", limited)
best = limited.best_without_memory_limit
print(f"with more memory: {best.name}, RMSE {best.rmse:.2f}; the limit costs {limited.rmse / best.rmse - 1:.1%}")

# %% [markdown]
# The picture of a plan shows all candidates. What does not fit lies in the gray area.

# %%
limited.plot()

# %% [markdown]
# ## Devices
#
# The noise is divided among the devices, as the weights are in FSDP. With more of them the same limit holds more bands,
# until the best number fits.

# %%
for devices in (1, 2, 4, 8):
    setting = {"memory": "1.5GB", "devices": devices, "sampling": "cyclic-poisson"}
    row(f"1.5 GB on each of {devices}", bandmf.plan(**budget, parameters=PARAMETERS, **setting))

# %% [markdown]
# ## Next to no memory: balls-in-bins
#
# With *balls-in-bins* sampling, every example draws one secret place in the epoch and takes part there in every epoch.
# Noise may then be correlated over all steps, and two kinds of matrices need little or no history:
#
# - a *BLT* keeps four vectors, however many steps there are;
# - a *banded inverse* keeps none: it draws the noise of the last 16 steps again, from the key, in every step. That
#   takes more time and, if there is room, a vector or two make it faster.
#
# The noise of these plans rests on a certificate, which `plan.verify()` computes again. That is why they take seconds.

# %%
blt = bandmf.plan(**budget, parameters=PARAMETERS, mechanism="blt", **certify)
inverse = bandmf.plan(**budget, parameters=PARAMETERS, mechanism="banded-inverse", memory="0.1GB", **certify)
row("BLT", blt)
row("banded inverse", inverse)

# %% [markdown]
# ## Compare
#
# Here is everything in one picture, for one device. The line is the paper's mechanism with ever more memory. In bins
# the error is lower, with four vectors or none.

# %%
limits = (1, 4) if SHORT else (0.5, 1, 2, 4, 8)
banded = [
    bandmf.plan(**budget, parameters=PARAMETERS, sampling="cyclic-poisson", memory=f"{limit}GB") for limit in limits
]
figure = memory(
    {
        "DP-SGD": [(dp_sgd.vectors, dp_sgd.rmse)],
        "BandMF": [(plan.vectors, plan.rmse) for plan in (*banded, unlimited)],
        "BLT in bins": [(blt.vectors, blt.rmse)],
        "Banded inverse in bins": [(inverse.vectors, inverse.rmse)],
    },
    "Error against memory",
)
figure

# %% [markdown]
# In practice there is nothing to choose. Give the planner the limit, and it takes what has the least error there.
# `plan.choice` says why.

# %%
plan = bandmf.plan(**budget, parameters=PARAMETERS, memory="2.5GB", **certify)
row("at most 2.5 GB", plan)
print(plan.choice)

# %% [markdown]
# Which mechanisms are there, besides these? `bandmf.compare` computes all of them at one budget, here for a short run.
# The bars in gray have no amplification by sampling: for federated training, where no one can draw batches at random.

# %%
table = bandmf.compare(epsilon=4, delta=1e-6, steps=16 if SHORT else 64, epochs=4)
figure, (axis,) = panels(1, width=8, height=4.6)
shades = [color(each.mechanism) if each.amplified else "#bbbbbb" for each in table]
bars = axis.barh([each.mechanism for each in table], [each.rmse for each in table], color=shades, height=0.65)
axis.bar_label(bars, [f"{each.rmse:.2f}, {each.vectors} vectors" for each in table], padding=4, fontsize=8)
axis.invert_yaxis()
axis.grid(visible=False)
axis.margins(x=0.2)
axis.set(xlabel="RMSE", title="Every mechanism at one budget")
figure

# %% [markdown]
# ## Save and load
#
# A plan is one file without a secret in it: a colleague can read it, and training can be started from it elsewhere.
# Whoever loads it does not have to trust it. A changed file is refused, and the accountant runs again.

# %%
folder = Path(tempfile.mkdtemp())
path = plan.save(folder / "plan.json")
loaded = bandmf.Plan.load(path)
assert loaded == plan
print(f"{path.name}: {path.stat().st_size / 1024:.0f} KiB, digest {loaded.digest[:16]}")

changed = folder / "changed.json"
changed.write_text(path.read_text().replace('"epsilon": 4', '"epsilon": 1'))
try:
    bandmf.Plan.load(changed)
except ValueError as refusal:
    print("refused:", str(refusal).replace(str(folder), "..."))

# %% [markdown]
# ## What to read next
#
# - `docs/plan.md`: every argument of `bandmf.plan`, and plans for federated training.
# - `docs/balls-in-bins.md`: how the certificate works, and when to prefer which mechanism.
# - `docs/multi-gpu.md`: training on several GPUs, where the history is divided among them.
