# A party of a federation: docker build -f deploy/party.Dockerfile -t pfedhn-party .
FROM python:3.11-slim

RUN useradd --create-home --uid 1000 pfedhn && mkdir /state && chown pfedhn /state
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src src
RUN pip install --no-cache-dir --constraint constraints.txt ".[federation,privacy]"

USER 1000
WORKDIR /state
VOLUME /state
ENTRYPOINT ["pfedhn"]
CMD ["join", "/invite/bundle", "--data", "/data", "--folder", "/state/party"]
