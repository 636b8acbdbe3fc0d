# The server of a federation: docker build -f deploy/server.Dockerfile -t pfedhn-server .
FROM python:3.11-slim

RUN useradd --create-home --uid 1000 pfedhn && mkdir /state && chown pfedhn /state
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src src
RUN pip install --no-cache-dir --constraint constraints.txt ".[federation]"

USER 1000
WORKDIR /state
VOLUME /state
EXPOSE 9443
# A certificate of one's own need not name localhost; that it is of the authority is checked all the same.
HEALTHCHECK --interval=30s --timeout=10s --start-period=30s \
    CMD ["python", "-c", "import ssl, urllib.request as u; c = ssl.create_default_context(cafile='/state/federation/ca.crt'); c.check_hostname = False; u.urlopen('https://localhost:9443/health', context=c)"]
ENTRYPOINT ["pfedhn"]
CMD ["serve", "/spec/federation.toml", "--state", "/state/federation"]
