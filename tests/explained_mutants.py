"""Mutants that no test can tell from the code, or that are as good, and why (`mutation.py`)."""

CHUNK = "_CHUNK_ELEMENTS = 2**21"
CHUNK_WHY = "sets how many resamples are held at once, not what they are"
EXPLAINED: dict[tuple[str, str, str], str] = {  # (module, line, change): why no test can tell
    ("uq/bootstrap", CHUNK, "2 -> 3"): CHUNK_WHY,
    ("uq/bootstrap", CHUNK, "Pow -> Mult"): CHUNK_WHY,
    (
        "train/objective",
        "derivatives = self.derivatives(batch, create_graph=False)",
        "False -> True",
    ): "costs memory during validation; values are the same",
    (
        "active/select",
        'return True, scores["force_std"], number',
        "True -> False",
    ): "a std is positive and what it is compared with, minus a score, is not",
    (
        "active/select",
        'return False, -scores[self._select.rule] / scores["atoms"] ** self._select.cost, number',
        "False -> True",
    ): "the same from the other side",
    (
        "bayes/sketch",
        "return (v.index_select(1, bucket) * sign.to(v)).view(len(v), *self.shapes[name])",
        "Mult -> Div",
    ): "signs are 1 and -1",
    (
        "active/rules",
        "return float(np.random.default_rng([seed, 77, round, index]).random())",
        "77 -> 78",
    ): "names a stream of random numbers; any other is as good",
    (
        "active/rules",
        "REFRESHED = 16  # candidates whose gain is worked out again at once",
        "16 -> 17",
    ): "sets how much is worked out at once, not what is chosen",
    (
        "active/rules",
        "kept = values > NEGLIGIBLE * max(float(values[-1]), np.finfo(float).tiny)",
        "Mult -> Div",
    ): "what is dropped or kept beside changes rows by less than 1e-9 of their size",
    (
        "active/rules",
        "NEGLIGIBLE = 1e-12  # eigenvalues of B B^T below this share of the largest are rounding",
        "1e-12 -> 2e-12",
    ): "both are rounding",
    (
        "inference/scale",
        "for kappa in size * 10.0 ** np.arange(-3.0, 3.01, 0.25):",
        "Mult -> Div",
    ): "the powers come in pairs of opposite sign",
    (
        "inference/scale",
        "floors = np.concatenate([[0.0], np.median(var) * 10.0 ** np.arange(-4.0, 4.01, 0.125)])",
        "Mult -> Div",
    ): "the powers come in pairs of opposite sign",
    (
        "inference/scale",
        "floors = np.concatenate([[0.0], np.median(var) * 10.0 ** np.arange(-4.0, 4.01, 0.125)])",
        "4.0 -> 8.0",
    ): "floors that small are below the least one",
    (
        "inference/scale",
        "best = Fit(np.inf, 1.0, 1.0)",
        "1.0 -> 2.0",
    ): "every fit is better than an infinite one",
    (
        "bayes/estimators",
        "VAR_FLOOR = 1e-12",
        "1e-12 -> 2e-12",
    ): "both are below what single precision resolves beside a variance",
    (
        "bayes/estimators",
        "SIGN_BIT = -(2**31)  # of a float32, as an int32",
        "without USub",
    ): "the same 32 bits",
    (
        "bayes/estimators",
        "return _means_and_noise(h, weight, bias, coef.sqrt()[:, None] * sign, eps)",
        "Mult -> Div",
    ): "signs are 1 and -1",
    (
        "bayes/sketch",
        "flat = value.flatten(1) * sign.to(value)",
        "Mult -> Div",
    ): "signs are 1 and -1",
    ("uq/bootstrap", CHUNK, "21 -> 22"): CHUNK_WHY,
    (
        "uq/metrics",
        "return float(np.clip(a @ b / scale, -1.0, 1.0)) if scale > 0.0 else 0.0",
        "1.0 -> 2.0",
    ): "cuts rounding beyond 1",
    (
        "uq/metrics",
        "if rest <= 1e-12:",
        "1e-12 -> 2e-12",
    ): "both are rounding",
    (
        "uq/calibrate",
        "number = math.ceil((n + 1) * level - 1e-9)  # guard against (n + 1) * level = 9.000000001",
        "1e-09 -> 2e-09",
    ): "both are rounding",
    (
        "uq/calibrate",
        "needed = math.ceil(level / (1.0 - level) - 1e-9)",
        "1e-09 -> 2e-09",
    ): "both are rounding",
    (
        "sim/guard",
        "cutoff=SEARCH_RADIUS, full_list=True, sorted=False",
        "False -> True",
    ): "the order of pairs decides nothing",
    (
        "active/select",
        'row["beyond"] = 1.0',
        "1.0 -> 2.0",
    ): "a mark whose value is not read",
    (
        "active/select",
        "TARGETS = 128  # structures that stand for the target distribution",
        "128 -> 129",
    ): "how many stand for all; one more is as good",
    (
        "active/select",
        "rng, given = np.random.default_rng([config.seed, 5]), config.select.target",
        "5 -> 6",
    ): "names a stream of random numbers; any other is as good",
}
