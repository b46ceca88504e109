// The process's one link: made at first use, ended at exit, dead in a forked child.
#include <pthread.h>

#include <atomic>
#include <cstdlib>
#include <memory>

#include "engine.h"

namespace polyccl {
namespace {

std::atomic<Engine*> the_engine{nullptr};

void before_fork() {
  if (Engine* engine = the_engine) engine->before_fork();
}
void after_fork_in_parent() {
  if (Engine* engine = the_engine) engine->after_fork_in_parent();
}
void after_fork_in_child() {
  if (Engine* engine = the_engine) engine->after_fork_in_child();
}

Engine* start() {
  // Never destroyed: threads that wait on it may outlive every static object.
  Engine* engine = std::make_unique<Engine>().release();
  the_engine = engine;
  pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
  std::atexit(Link::end);
  return engine;
}

}  // namespace

Link& Link::instance() {
  static Engine* engine = start();
  return *engine;
}

void Link::end() {
  if (Engine* engine = the_engine) engine->shutdown();
}

}  // namespace polyccl
