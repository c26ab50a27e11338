"""The page itself, a script that Streamlit runs again after every change: inputs to the left, answers to the right."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from bandmf._text import counted, number, readable_bytes
from bandmf.planning import Candidate, Plan
from bandmf.web import answers, charts, sentences
from bandmf.web.answers import AUTO, CYCLIC, Mechanism, Needs, Point
from bandmf.web.download import plan_file
from bandmf.web.question import Question, command, count, python_code

_DELTAS = [float(f"{digit}e-{power}") for power in range(3, 13) for digit in (5, 2, 1)]
_STYLE = """<style>
.block-container {padding-top: 2.2rem; padding-bottom: 3rem; max-width: 1320px;}
[data-testid="stMetricValue"] {font-size: 2.1rem; font-weight: 600;}
[data-testid="stMetricLabel"] p {font-size: 0.95rem;}
[data-testid="stCaptionContainer"] {margin-top: -0.6rem;}
</style>"""


def main() -> None:
    """Inputs, and the answers to them."""
    st.set_page_config(page_title="bandmf: plan private training", page_icon="🔒", layout="wide")
    st.markdown(_STYLE, unsafe_allow_html=True)
    st.title("Plan private training", anchor=False)
    st.markdown(
        "Choose a privacy budget and describe your training. bandmf finds the noise that disturbs it least, and says "
        "what other methods would cost."
    )
    left, right = st.columns([1, 2.1], gap="large")
    with left:
        question = _inputs()
    with right:
        if question is not None:
            _answers(question)


# --- inputs -----------------------------------------------------------------------------------------------


def _inputs() -> Question | None:
    """The question; None, with the reason shown, where the inputs make none.

    All inputs are drawn before any is read: Streamlit forgets what was typed into one that is not drawn.
    """
    with st.container(border=True):
        st.subheader("Privacy", anchor=False)
        epsilon, delta, note = _budget()
    with st.container(border=True):
        st.subheader("Data and training", anchor=False)
        training = _training()
    with st.container(border=True):
        st.subheader("Model and machines", anchor=False)
        model = _model()
    try:
        question = _question(epsilon, delta, training, model)
    except ValueError as error:
        st.error(f"{error}")
        return None
    least = 1 / question.examples
    note.caption(f"The probability with which that may fail. Keep it below 1 / examples = {least:.2g}.")
    if warning := sentences.delta_warning(question):
        st.warning(warning)
    return question


def _question(epsilon: float, delta: float, training: dict[str, Any], model: dict[str, Any]) -> Question:
    """The inputs as numbers, if they make sense together."""
    examples, parameters = count("examples", training["examples"]), count("parameters", model["parameters"])
    if examples is None:
        raise ValueError("examples: must be given, such as 60000, 60k or 1.5M")
    if parameters is None:  # then nothing can be said of memory
        model = {}
    numbers = {**training, **model, "examples": examples, "parameters": parameters}
    question = Question(epsilon=epsilon, delta=delta, **numbers)
    question.request()
    return question


def _budget() -> tuple[float, float, DeltaGenerator]:
    """With the place for a note on delta, which speaks of the examples."""
    epsilon = st.slider("Epsilon", 0.1, 20.0, 4.0, 0.1, key="epsilon")
    st.caption(
        f"The limit on what a trained model may reveal about any one example. {epsilon:g} is "
        f"{sentences.epsilon_in_words(epsilon)}; smaller is more private and takes more noise."
    )
    delta = st.select_slider("Delta", _DELTAS, 1e-6, format_func=number, key="delta")
    return epsilon, delta, st.empty()


def _training() -> dict[str, Any]:
    examples = st.text_input("Examples", "60k", key="examples")
    st.caption("In the data set: 60000, 60k and 1.5M are understood.")
    batch_size = st.number_input("Batch size", 1, None, 512, 64, key="batch_size")
    st.caption("Examples in a step, on average. Larger batches drown out noise, and take more time.")
    by = st.radio("Length", ("epochs", "steps"), horizontal=True, key="by")
    given: dict[str, Any] = {"examples": examples, "batch_size": int(batch_size)}
    if by == "epochs":
        given["epochs"] = st.slider("Epochs", 1, 50, 8, key="epochs")
        st.caption("Passes over the data.")
    else:
        given["steps"] = int(st.number_input("Steps", 1, None, 1000, 100, key="steps"))
        st.caption("Updates of the weights.")
    return given


def _model() -> dict[str, Any]:
    parameters = st.text_input("Parameters of the model", "25M", key="parameters")
    st.caption("Only those that are trained. Leave it empty if you do not know: then memory is left out.")
    unknown = not parameters.strip()
    devices = st.number_input("Devices", 1, 65536, 1, key="devices", disabled=unknown)
    st.caption("GPUs or machines that share the noise.")
    memory = st.text_input("Memory for noise on each device", "", placeholder="any", key="memory", disabled=unknown)
    st.caption('Such as "2 GB"; empty for as much as it takes.')
    return {"parameters": parameters, "devices": int(devices), "memory": memory.strip() or None}


# --- answers ----------------------------------------------------------------------------------------------


def _answers(question: Question) -> None:
    """What is known first is shown first: the plan, then what DP-SGD would need, then everyone else."""
    made = st.session_state.setdefault("certified", {}).get(question)
    sampling = CYCLIC if made is None else AUTO
    numbers, sentence, certifying = st.container(), st.container(), st.container()
    charts_of = st.container()
    with numbers:
        made = _searched(question) if made is None else made
    if made is not None:
        with numbers:
            _numbers(made, question)
        with charts_of:
            bands = _bands(made, question)
    table = charts_of.container()
    if made is not None:
        with st.container():
            _results(made, question, sampling)
        with sentence:
            st.info(sentences.against_dp_sgd(made, _needs(made)))
    with certifying:
        _certify(question, made, sampling)
    _mechanisms(question, made, table)
    if made is not None and len(points := _octaves(made.digest, question, made)) > 1:
        bands.altair_chart(charts.bands(points), width="stretch")


@st.cache_resource(max_entries=200, show_spinner=False)
def _kept(question: Question) -> list[Plan]:
    """Where the plan of a question is put, once it is found: plans never change."""
    return []


def _searched(question: Question) -> Plan | None:
    """The plan with cyclic Poisson sampling; None, with the reason shown, where there is none."""
    kept, line = _kept(question), st.empty()  # always there, so that nothing below it changes its place
    if kept:
        return kept[0]
    line.caption("Searching.")
    started, seen = time.monotonic(), list[Candidate]()

    def progress(found: Candidate | str) -> None:
        if isinstance(found, Candidate):
            seen.append(found)
        if seen and time.monotonic() - started > 0.5:
            best = min(seen, key=lambda each: each.rmse)
            error = best.rmse / question.batch_size
            line.caption(f"Searching: {len(seen)} candidates so far; {best.name}, error about {error:.3g} (estimate).")

    try:
        made = answers.cyclic(question, progress)
    except (ValueError, ArithmeticError) as error:
        line.error(f"{error}")
        return None
    line.empty()
    kept.append(made)
    return made


def _numbers(made: Plan, question: Question) -> None:
    error, correlation, memory, privacy = st.columns(4)
    against = None
    if made.dp_sgd_ratio is not None and made.bands > 1:
        against = f"{1 / made.dp_sgd_ratio - 1:.0%} vs. DP-SGD"
    error.metric("Error", f"{made.mean_rmse:.3g}", against, delta_color="inverse", border=True)
    name = "DP-SGD" if made.bands == 1 else counted(made.bands, "band")
    if made.in_bins:
        name = {"blt": "BLT", "banded-inverse": "Inverse"}.get(made.mechanism, name)
    _quiet_metric(correlation, "Noise", name, f"multiplier {made.noise_multiplier:.3g}")
    vectors = counted(made.vectors, "vector")
    held = vectors if made.memory is None else readable_bytes(made.memory)
    _quiet_metric(memory, "Noise memory", held, vectors if made.memory else "on each device")
    _quiet_metric(privacy, "Privacy", f"ε = {made.epsilon:g}", "certified", "green")
    st.caption(
        f"For {sentences.length(question, made.steps)}. Error: standard deviation of the noise in the running sum of "
        "mean gradients, for each parameter, at clip norm 1. Memory: on each device, in vectors of the model's size."
    )


def _quiet_metric(place: DeltaGenerator, label: str, value: str, note: str, color: Any = "gray") -> None:
    place.metric(label, value, note, delta_color=color, delta_arrow="off", border=True)


@st.cache_data(max_entries=200, show_spinner=False)
def _needs_of(digest: str, _made: Plan) -> Needs:
    return answers.dp_sgd_needs(_made)


def _needs(made: Plan) -> Needs:
    return _needs_of(made.digest, made)


def _bands(made: Plan, question: Question) -> DeltaGenerator:
    """The curve as far as the plan knows it; returns its place, for a smoother one."""
    points = answers.curve(made, question)
    st.subheader("How many bands", anchor=False)
    st.caption(
        "Noise that is correlated over more steps cancels better, but examples can hide less in random batches. "
        "Somewhere between is the best."
        + (" Gray: too large for the memory." if not all(each.fits for each in points) else "")
    )
    place = st.empty()
    place.altair_chart(charts.bands(points), width="stretch")
    return place


@st.cache_data(max_entries=200, show_spinner=False)
def _octaves(digest: str, question: Question, _made: Plan) -> list[Point]:
    return answers.octaves(_made, question)


def _certify(question: Question, made: Plan | None, sampling: str) -> None:
    """What the guarantee rests on, and the way to a plan with balls-in-bins."""
    if sampling == AUTO and made is not None:
        how = "by the accountant"
        if made.certificate is not None:
            how = f"by {made.certificate.samples:,} samples"
        st.success(f"The best plan of all, certified {how}. {made.choice[:1].upper()}{made.choice[1:]}.")
        return
    text, button = st.columns([2.4, 1], vertical_alignment="center")
    here = "Shown is the best plan with **cyclic Poisson sampling**, certified by the accountant."
    if made is None:
        here = "There is no plan with **cyclic Poisson sampling** for this."
    text.markdown(
        f"{here} **Balls-in-bins** may have less error, below as an estimate; to certify it takes up to a minute."
    )
    if button.button("Certify the best of all", type="primary", width="stretch", key="certify"):
        _run_certification(question)


def _run_certification(question: Question) -> None:
    with st.status("Certifying", expanded=True) as status:
        line, started = st.empty(), time.monotonic()

        def progress(found: Candidate | str) -> None:
            text = found if isinstance(found, str) else f"found {found.name}"
            status.update(label=f"Certifying, {time.monotonic() - started:.0f} seconds so far")
            line.write(f"{text[0].upper()}{text[1:]}")

        try:
            st.session_state["certified"][question] = answers.certified(question, progress)
        except (ValueError, ArithmeticError) as error:
            status.update(label="Not certified", state="error")
            line.error(f"{error}")
            return
    st.rerun()


# --- everyone else ----------------------------------------------------------------------------------------


def _mechanisms(question: Question, made: Plan | None, place: DeltaGenerator) -> None:
    place.subheader("Every other mechanism", anchor=False)
    note, chart = place.empty(), place.empty()
    rows: list[Mechanism] = []
    try:
        for row in _each(question, made):
            rows.append(row)
            plans = None if made is None else made.mean_rmse
            if len(rows) > 3:
                chart.altair_chart(charts.mechanisms(rows, plans), width="stretch")
    except (ValueError, ArithmeticError) as error:  # budgets far from any use
        place.caption(f"The rest could not be computed: {error}")
    note.caption(_note(question, made, rows))


def _each(question: Question, made: Plan | None) -> Iterator[Mechanism]:
    if made is not None:
        yield from answers.of_plan(made, question)
    if made is None or not made.in_bins:
        yield from _glanced(question)
    yield from answers.unamplified(question)


@st.cache_data(max_entries=200, show_spinner=False)
def _glanced(question: Question) -> list[Mechanism]:
    return list(answers.in_bins(question))


def _note(question: Question, made: Plan | None, rows: list[Mechanism]) -> str:
    text = "At the same privacy. Unamplified ones need no random batches: every example once an epoch."
    if any(row.estimated for row in rows):
        return f"{text} Pale bars are estimates from few samples, a few percent too high."
    if made is not None and made.in_bins:
        return text
    return f"{text} Balls-in-bins {answers.bins_obstacle(question)}."


# --- to take away -----------------------------------------------------------------------------------------


def _results(made: Plan, question: Question, sampling: str) -> None:
    st.subheader("Take it with you", anchor=False)
    file, code, line, explained = st.tabs(["Plan file", "Python", "Command line", "In words"])
    with file:
        download = plan_file(made)
        st.markdown('Training reads it with `bandmf.Plan.load("plan.json")`, which checks it again.')
        st.download_button("Download the plan", download.contents, download.name, on_click="ignore")
        st.caption(f"SHA-256 of the plan: {made.digest}")
    code.code(python_code(question, sampling), language="python")
    line.code(command(question, sampling), language="bash")
    with explained:
        for paragraph in made.explain().split("\n\n"):
            st.markdown(paragraph.replace("*", r"\*").replace("$", r"\$").replace("_", r"\_"))


if __name__ == "__main__":
    main()
