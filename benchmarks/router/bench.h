/* What the load generator and the HTTP stub share: the clock, the vocabulary of fixed-width pieces, and the table of
 * stamps. The engine stub (Python) uses the same two files; stamps.py makes them. */
#ifndef SLUICE_BENCH_H
#define SLUICE_BENCH_H

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

/* Bytes of every piece: tokens stay countable when a router merges them into one chunk. */
#define PIECE_BYTES 4

__attribute__((noreturn, format(printf, 1, 2))) static inline void die(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vfprintf(stderr, format, arguments);
  va_end(arguments);
  fputc('\n', stderr);
  exit(1);
}

static inline uint64_t now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static inline void *allocate(void *old, size_t bytes) {
  void *memory = realloc(old, bytes);
  if (!memory) die("out of memory: %zu bytes", bytes);
  return memory;
}

/* Token i of the answer with number r is piece (r + i) modulo count: a lost, doubled or reordered token shows. */
struct pieces {
  uint32_t count;
  char (*text)[PIECE_BYTES];
};

/* File: one line "ID PIECE" each, the piece being the last PIECE_BYTES of the line. */
static inline struct pieces load_pieces(const char *path) {
  struct pieces pieces = {0, NULL};
  FILE *file = fopen(path, "r");
  if (!file) die("%s: %s", path, strerror(errno));
  char line[64];
  while (fgets(line, sizeof line, file)) {
    size_t length = strcspn(line, "\n");
    if (length < PIECE_BYTES + 2) die("%s: bad line: %s", path, line);
    pieces.text = allocate(pieces.text, (pieces.count + 1) * sizeof *pieces.text);
    memcpy(pieces.text[pieces.count++], line + length - PIECE_BYTES, PIECE_BYTES);
  }
  fclose(file);
  if (!pieces.count) die("%s: no pieces", path);
  return pieces;
}

static inline const char *piece_of(const struct pieces *pieces, uint64_t request, uint64_t index) {
  return pieces->text[(request + index) % pieces->count];
}

/* The table of stamps: 8 words of header, then rows of `columns` words. A row belongs to request number r modulo rows:
 * word 0 is when the stub had read the request, word 1 + i is when it sent token i (CLOCK_MONOTONIC, ns). */
enum { STAMP_MAGIC, STAMP_ROWS, STAMP_COLUMNS, STAMP_TOKENS_SENT, STAMP_REQUESTS_READ, STAMP_HEADER_WORDS = 8 };
#define STAMP_MAGIC_VALUE 0x53544d50u

struct stamps {
  volatile uint64_t *header;
  volatile uint64_t *cells;
  uint64_t rows, columns;
};

static inline struct stamps map_stamps(const char *path) {
  int fd = open(path, O_RDWR | O_CLOEXEC);
  struct stat status;
  if (fd < 0 || fstat(fd, &status)) die("%s: %s", path, strerror(errno));
  uint64_t *words = mmap(NULL, (size_t)status.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (words == MAP_FAILED) die("%s: %s", path, strerror(errno));
  close(fd);
  if (words[STAMP_MAGIC] != STAMP_MAGIC_VALUE) die("%s: not a table of stamps", path);
  struct stamps stamps = {words, words + STAMP_HEADER_WORDS, words[STAMP_ROWS], words[STAMP_COLUMNS]};
  return stamps;
}

static inline volatile uint64_t *stamp_row(const struct stamps *stamps, uint64_t request) {
  return stamps->cells + (request % stamps->rows) * stamps->columns;
}

/* Value of an unsigned number after `key` (with its quotes and colon) in a JSON text; `fallback` when it is not there. */
static inline uint64_t json_number(const char *text, size_t length, const char *key, uint64_t fallback) {
  const char *at = memmem(text, length, key, strlen(key));
  if (!at) return fallback;
  const char *end = text + length;
  for (at += strlen(key); at < end && *at == ' ';) at++;
  if (at == end || *at < '0' || *at > '9') return fallback;
  uint64_t value = 0;
  for (; at < end && *at >= '0' && *at <= '9'; at++) value = value * 10 + (uint64_t)(*at - '0');
  return value;
}

/* Start of the string after `key` in a JSON text, its bytes in *size; NULL when it is not there. Pieces need no escapes. */
static inline const char *json_string(const char *text, size_t length, const char *key, size_t *size) {
  const char *at = memmem(text, length, key, strlen(key));
  if (!at) return NULL;
  const char *end = text + length;
  for (at += strlen(key); at < end && *at == ' ';) at++;
  if (at == end || *at != '"') return NULL;
  at++;
  const char *close_quote = memchr(at, '"', (size_t)(end - at));
  if (!close_quote) return NULL;
  *size = (size_t)(close_quote - at);
  return at;
}

/* Value of a header field in a head that ends with an empty line; NULL when it is not there. `name` is lower case. */
static inline const char *header_value(const char *head, size_t length, const char *name) {
  size_t name_length = strlen(name);
  const char *end = head + length;
  for (const char *line = memchr(head, '\n', length); line; line = memchr(line, '\n', (size_t)(end - line))) {
    if (++line + name_length >= end) return NULL;
    if (!strncasecmp(line, name, name_length) && line[name_length] == ':') {
      for (line += name_length + 1; *line == ' ';) line++;
      return line;
    }
  }
  return NULL;
}

/* Options "--name VALUE", numbers by strtod. */
static inline const char *option(int count, char **values, const char *name, const char *fallback) {
  for (int i = 1; i + 1 < count; i++)
    if (!strcmp(values[i], name)) return values[i + 1];
  if (!fallback) die("%s is missing", name);
  return fallback;
}

static inline double number_option(int count, char **values, const char *name, double fallback) {
  const char *text = option(count, values, name, "");
  char *end;
  double value = *text ? strtod(text, &end) : fallback;
  if (*text && *end) die("%s: not a number: %s", name, text);
  return value;
}

static inline bool has_option(int count, char **values, const char *name) {
  for (int i = 1; i < count; i++)
    if (!strcmp(values[i], name)) return true;
  return false;
}

#endif
