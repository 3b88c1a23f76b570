/* TLS for the load generator: OpenSSL's library as Python has it, found at run time, because its headers may be missing.
 *
 * Connections of the generator do not check the router's certificate. */
#ifndef SLUICE_CLIENT_TLS_H
#define SLUICE_CLIENT_TLS_H

#include "bench.h"

#include <dlfcn.h>
#include <signal.h>

/* Numbers of openssl/ssl.h, the same in 1.1.1 and 3. */
enum { TLS_WANT_READ = 2, TLS_WANT_WRITE = 3, TLS_ZERO_RETURN = 6, TLS_SET_READ_AHEAD = 41 };

/* The functions, each under its own name without SSL_. */
static struct {
  void *context;
  void *(*new)(void *context);
  void (*free)(void *tls);
  int (*set_fd)(void *tls, int fd);
  int (*connect)(void *tls);
  int (*shutdown)(void *tls);
  int (*read)(void *tls, void *buffer, int size);
  int (*write)(void *tls, const void *data, int size);
  int (*get_error)(const void *tls, int result);
  int (*has_pending)(const void *tls);
  int (*set_session)(void *tls, void *session);
  void *(*get1_session)(void *tls);
  void (*session_free)(void *session);
  int (*session_reused)(const void *tls);
  void (*clear_errors)(void);
} tls_api;

static inline void load_tls(void) {
  void *library = NULL, *(*method)(void), *(*new_context)(const void *);
  long (*control)(void *, int, long, void *);
  const char *names[] = {"libssl.so.3", "libssl.so.1.1", "libssl.so"};
  for (size_t i = 0; i < 3 && !library; i++) library = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
  if (!library) die("TLS needs OpenSSL's libssl.so: %s", dlerror());
  struct {
    const char *name;
    void *place;
  } functions[] = {
      {"TLS_client_method", &method},
      {"SSL_CTX_new", &new_context},
      {"SSL_CTX_ctrl", &control},
      {"SSL_new", &tls_api.new},
      {"SSL_free", &tls_api.free},
      {"SSL_set_fd", &tls_api.set_fd},
      {"SSL_connect", &tls_api.connect},
      {"SSL_shutdown", &tls_api.shutdown},
      {"SSL_read", &tls_api.read},
      {"SSL_write", &tls_api.write},
      {"SSL_get_error", &tls_api.get_error},
      {"SSL_has_pending", &tls_api.has_pending},
      {"SSL_set_session", &tls_api.set_session},
      {"SSL_get1_session", &tls_api.get1_session},
      {"SSL_SESSION_free", &tls_api.session_free},
      {"SSL_session_reused", &tls_api.session_reused},
      {"ERR_clear_error", &tls_api.clear_errors},
  };
  for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
    void *function = dlsym(library, functions[i].name);
    if (!function) die("%s is not in OpenSSL's library", functions[i].name);
    memcpy(functions[i].place, &function, sizeof function);
  }
  /* OpenSSL writes without MSG_NOSIGNAL. */
  signal(SIGPIPE, SIG_IGN);
  tls_api.context = new_context(method());
  if (!tls_api.context) die("TLS: no context");
  /* Otherwise each record takes two calls of recv. */
  control(tls_api.context, TLS_SET_READ_AHEAD, 1, NULL);
}

/* What `result` means, as send and recv say it: 0 at the end, -1 and errno. */
static inline ssize_t tls_fault(void *tls, int result) {
  int error = tls_api.get_error(tls, result);
  if (error == TLS_ZERO_RETURN) return 0;
  errno = error == TLS_WANT_READ || error == TLS_WANT_WRITE ? EAGAIN : EPROTO;
  return -1;
}

/* Reads at most one record. */
static inline ssize_t tls_read(void *tls, void *buffer, size_t size) {
  tls_api.clear_errors();
  int result = tls_api.read(tls, buffer, (int)size);
  return result > 0 ? result : tls_fault(tls, result);
}

static inline ssize_t tls_write(void *tls, const void *data, size_t size) {
  tls_api.clear_errors();
  int result = tls_api.write(tls, data, (int)size);
  return result > 0 ? result : tls_fault(tls, result);
}

/* Goes on with a handshake: 1 when it is over, -1 and errno, EAGAIN among others. */
static inline ssize_t tls_connect(void *tls) {
  tls_api.clear_errors();
  int result = tls_api.connect(tls);
  return result == 1 ? 1 : tls_fault(tls, result) ? -1 : (errno = ECONNRESET, -1);
}

#endif
