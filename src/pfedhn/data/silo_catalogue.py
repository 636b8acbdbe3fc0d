"""The natural federations that the package knows: their files, columns and origins."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pfedhn.data import silo_files
from pfedhn.data.silo_files import Cells


@dataclass(frozen=True)
class SiloFile:
    """An original file."""

    name: str
    size: int | None = None  # in bytes
    sha256: str | None = None
    others: tuple[str, ...] = ()  # names that copies have
    examples: int | None = None  # what is counted in a file whose checksum is not known


@dataclass(frozen=True)
class Silo:
    """A natural federation: a table, its clients and its origin."""

    name: str
    description: str
    each: str  # what a client is
    clients: int
    examples: int
    client: str  # the columns that are no features
    label: str
    task: Literal["classification", "regression"]
    features: tuple[str, ...]
    choices: str  # which columns are left out and which cells are empty
    source: str  # a citation
    where: str  # the files can be had
    licence: str
    files: tuple[tuple[SiloFile, ...], ...]  # any one of these sets is enough
    read: Callable[[Sequence[Path]], Cells]
    item: tuple[str, str] | None = None  # an R package and its table, which a Python package carries
    cells_sha256: str = ""  # of the columns, if a package carries them

    @property
    def wanted(self) -> str:
        """The files it is read from, in words."""
        sets = [" and ".join(file.name for file in files) for files in self.files]
        return " or ".join(sets)


STROKE_FEATURES = (
    *("RDELAY", "RCONSC", "SEX", "AGE", "RSLEEP", "RATRIAL", "RCT", "RVISINF", "RHEP24", "RASP3", "RSBP"),
    *(f"RDEF{number}" for number in range(1, 9)),
    "STYPE",
)
WISDM_FEATURES = (
    *(f"{axis}{part}" for axis in "XYZ" for part in range(10)),
    *("YAVG", "ZAVG"),  # XAVG is 0 throughout
    *(f"{axis}{measure}" for measure in ("PEAK", "ABSOLDEV", "STANDDEV") for axis in "XYZ"),
    "RESULTANT",
)
VOICE_FEATURES = (
    *("Jitter(%)", "Jitter(Abs)", "Jitter:RAP", "Jitter:PPQ5", "Jitter:DDP", "Shimmer", "Shimmer(dB)"),
    *("Shimmer:APQ3", "Shimmer:APQ5", "Shimmer:APQ11", "Shimmer:DDA", "NHR", "HNR", "RPDE", "DFA", "PPE"),
)
R_TABLES = "Rdatasets, a collection of R's tables (package mlmRev)"


def _heart_file(hospital: str, size: int, sha256: str) -> SiloFile:
    name = f"processed.{hospital}.data"
    return SiloFile(name, size, sha256, (f"heart-{name}",))


def _r_file(item: str, size: int, sha256: str) -> SiloFile:
    return SiloFile(f"{item}.csv", size, sha256, (f"rdatasets-{item}.csv",))


SILOS: dict[str, Silo] = {
    silo.name: silo
    for silo in (
        Silo(
            "stroke",
            "patients of the International Stroke Trial: dead or dependent after six months",
            "hospital",
            clients=454,
            examples=9_743,
            client="HOSPNUM",
            label="outcome",
            task="classification",
            features=STROKE_FEATURES,
            choices="Features are known at randomization. All later columns, the predicted risks and the treatments "
            "(RXASP, RXHEP) are left out. Patients without an outcome (OCCODE is not 1 to 4) are dropped. RATRIAL and "
            "RASP3 are empty for the pilot phase. ist-train.csv is one half of the patients; IST_corrected.csv is the "
            "whole trial, whose 19,435 lines are counted instead of a checksum.",
            source="Sandercock, Niewada, Czlonkowska: The International Stroke Trial database. Trials 2011;12:101",
            where="Edinburgh DataShare 10283/124 (doi 10.7488/ds/104), which has the whole trial",
            licence="ODC-By, as others state who share it; not verified",
            files=(
                (
                    SiloFile(
                        "ist-train.csv",
                        2_458_105,
                        "b964f28ee85f9ba6606b015268b097cc0a946a6e1d34398793b9856f494bf9d7",
                    ),
                ),
                (SiloFile("IST_corrected.csv", examples=19_435, others=("ist_corrected.csv",)),),
            ),
            read=silo_files.read_stroke,
        ),
        Silo(
            "heart",
            "patients of four hospitals: heart disease found by angiography",
            "hospital",
            clients=4,
            examples=920,
            client="hospital",
            label="diagnosis",
            task="classification",
            features=silo_files.HEART_COLUMNS[:-1],
            choices="Sick means num > 0. A cholesterol or blood pressure of 0 is a missing cell: Switzerland has no "
            "cholesterol. slope, ca and thal stay, although few hospitals recorded them. Codes of kinds (cp, restecg, "
            "slope, thal) become texts.",
            source="Janosi, Steinbrunn, Pfisterer, Detrano: Heart Disease. UCI Machine Learning Repository, 1988",
            where="UCI Machine Learning Repository, Heart Disease (doi 10.24432/C52P4X)",
            licence="CC BY 4.0",
            files=(
                (
                    _heart_file(
                        "cleveland", 18_461, "a74b7efa387bc9d108d7d0115d831fe9b414b29ae7124f331b622b4efa0427c8"
                    ),
                    _heart_file(
                        "hungarian", 10_263, "d1ad108f785768cd3d7e82dc522e6f5a61eea93cccfb3a46ee8076f73fc3d796"
                    ),
                    _heart_file(
                        "switzerland", 4_109, "834a405ccf5b66ab4056bb77794adc8df0b7125186454c0a1d002d33c6c3b314"
                    ),
                    _heart_file("va", 6_737, "e7c93d8d0d2acdadfa4c5e8de768e2191e7f618b952e29623f1f0d5949ff6b8f"),
                ),
            ),
            read=silo_files.read_heart,
        ),
        Silo(
            "wisdm",
            "people who carry a phone: six activities from its accelerometer",
            "person",
            clients=36,
            examples=5_418,
            client="user",
            label="class",
            task="classification",
            features=WISDM_FEATURES,
            choices="UNIQUE_ID and XAVG, which is 0 throughout, are left out. Peaks that were not found are empty.",
            source="Kwapisz, Weiss, Moore: Activity Recognition using Cell Phone Accelerometers. SensorKDD 2010",
            where="WISDM Lab of Fordham University, activity prediction v1.1",
            licence="free to use; cite the paper and keep the readme with copies",
            files=(
                (
                    SiloFile(
                        "WISDM_ar_v1.1_transformed.arff",
                        1_197_772,
                        "8cb3fbbad6398ac4b817cc7b98f387efa89ac24b26d1270a5e7a1049a8f9c31a",
                        ("wisdm_ar_v1.1_transformed.arff",),
                    ),
                ),
            ),
            read=silo_files.read_arff,
        ),
        Silo(
            "school",
            "students of inner London: examination scores",
            "school",
            clients=139,
            examples=15_362,
            client="school",
            label="score",
            task="regression",
            features=silo_files.SCHOOL_COLUMNS[:-1],
            choices="The last column, which is 1 throughout, is left out. The file names no columns; the names are "
            "ours, from the literature.",
            source="Inner London Education Authority: School data, as the MALSAR package has them",
            where="MALSAR repository (github.com/jiayuzhou/MALSAR), folder data",
            licence="not stated",
            files=(
                (SiloFile("school.mat", 44_759, "57fb3238fdd03a9aa17276e2ce18d9bbb5d128c3261e794fe6233b58b6909068"),),
            ),
            read=silo_files.read_school,
        ),
        Silo(
            "exam",
            "students of inner London: normalized examination scores",
            "school",
            clients=65,
            examples=4_059,
            client="school",
            label="normexam",
            task="regression",
            features=("schgend", "schavg", "vr", "intake", "standLRT", "sex", "type"),
            choices="The numbers of rows and students are left out.",
            source="Goldstein et al.: A multilevel analysis of school examination results. Oxford Rev. Educ. 1993",
            where=R_TABLES,
            licence="redistributed with mlmRev (GPL 2 or later); no licence of the data is stated",
            files=((_r_file("Exam", 286_514, "9c87dc2a85401f0589bdb1c1e95049bd86648f80ab00c73b388f6b7079e711ac"),),),
            read=silo_files.read_r_table,
            item=("mlmRev", "Exam"),
            cells_sha256="7e71d663b709e335dc54c115785da8782436cdf7d5c5b71f69e37d97273180d9",
        ),
        Silo(
            "hsb82",
            "students of High School and Beyond 1982: mathematics scores",
            "school",
            clients=160,
            examples=7_185,
            client="school",
            label="mAch",
            task="regression",
            features=("minrty", "sx", "ses", "meanses", "sector"),
            choices="The row number is left out, and cses, which is ses less meanses.",
            source="Raudenbush, Bryk: Hierarchical Linear Models, chapter 4. Sage 2002",
            where=R_TABLES,
            licence="redistributed with mlmRev (GPL 2 or later); no licence of the data is stated",
            files=((_r_file("Hsb82", 557_288, "d820cf853af77e3163ffb828361defb25ac005f0074703c61fd35cad5cbd6b37"),),),
            read=silo_files.read_r_table,
            item=("mlmRev", "Hsb82"),
            cells_sha256="da3317987a63c2fc69d099032317e3d2fb65fc2d240f86acb201eda920448467",
        ),
        Silo(
            "parkinsons",
            "people with Parkinson's disease: total UPDRS from recordings of the voice",
            "patient",
            clients=42,
            examples=5_875,
            client="subject#",
            label="total_UPDRS",
            task="regression",
            features=("age", "sex", "test_time", *VOICE_FEATURES),
            choices="motor_UPDRS is a part of the score and is left out. test_time stays; the scores are "
            "interpolated in time, so recordings of the same days nearly share a label.",
            source="Tsanas, Little, McSharry, Ramig: Accurate telemonitoring of Parkinson's disease progression. IEEE "
            "Trans. Biomed. Eng. 2009",
            where="UCI Machine Learning Repository, Parkinsons Telemonitoring (doi 10.24432/C5ZS3N)",
            licence="CC BY 4.0",
            files=(
                (
                    SiloFile(
                        "parkinsons_updrs.data",
                        911_261,
                        "f2c7d5025dec4e92e7feae367a5f7ccf58789a10ac6b54bdf15976c599f9dd39",
                    ),
                ),
                (
                    SiloFile(
                        "parkinsons_updrs.tsv",
                        906_868,
                        "52229b3075c2109a2c144f5584d88cc5ea99022a9a9eaa6d978b2e8e7c6bc501",
                    ),
                ),
            ),
            read=silo_files.read_delimited,
        ),
    )
}
