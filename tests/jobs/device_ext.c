/* Tensors of device memory that offer DLPack's C exchange API as torch's do, and gates that hold up a stream. Compiled by device_side.py.
 *
 *   Tensor(owner, address, count, dtype=(code, bits), device=(type, index))
 *                      memory of `owner`, which lives as long as the tensor and all who hold on to it
 *   set_stream(handle) the stream that tensors call their device's current one
 *   Gate()             what a stream waits for: launch the host function `function` with the argument `address`; open() lets it go on
 *   late()             how many gates were not opened within 30 seconds, and opened themselves, so that nothing hangs
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>

#define GATE_SECONDS 30

typedef struct {
  void* data;
  int32_t device_type, device_index;
  int32_t ndim;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t *shape, *strides;
  uint64_t byte_offset;
} View;

typedef struct {
  uint32_t major, minor;
  const void* previous;
  void *allocate, *managed_from_object, *to_object;
  int (*view_from_object)(void*, View*);
  int (*current_stream)(int32_t, int32_t, void**);
} Api;

/* ---- Tensors ---- */

typedef struct {
  PyObject_HEAD View view;
  int64_t shape, stride;
  PyObject* owner;
} Tensor;

static void* stream = NULL;

static int fill_view(void* object, View* out) {
  *out = ((Tensor*)object)->view;
  return 0;
}

static int current_stream(int32_t type, int32_t index, void** out) {
  (void)type;
  (void)index;
  *out = stream;
  return 0;
}

static const Api api = {1, 3, NULL, NULL, NULL, NULL, fill_view, current_stream};

static int tensor_init(PyObject* self, PyObject* args, PyObject* keywords) {
  static char* names[] = {"owner", "address", "count", "dtype", "device", NULL};
  Tensor* tensor = (Tensor*)self;
  PyObject* owner = NULL;
  unsigned long long address = 0;
  long long count = 0;
  int code = 2, bits = 32, type = 2, index = 0;
  if (!PyArg_ParseTupleAndKeywords(args, keywords, "OKL|(ii)(ii)", names, &owner, &address, &count, &code, &bits, &type,
                                   &index)) {
    return -1;
  }
  tensor->shape = count;
  tensor->stride = 1;
  tensor->view = (View){(void*)(uintptr_t)address, type, index, 1, (uint8_t)code, (uint8_t)bits, 1, &tensor->shape,
                        &tensor->stride,           0};
  Py_XSETREF(tensor->owner, Py_NewRef(owner));
  return 0;
}

static void tensor_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  Py_XDECREF(((Tensor*)self)->owner);
  ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(type);
}

static PyType_Slot tensor_slots[] = {
    {Py_tp_init, (void*)tensor_init}, {Py_tp_dealloc, (void*)tensor_dealloc}, {0, NULL}};
static PyType_Spec tensor_spec = {"device_ext.Tensor", sizeof(Tensor), 0, Py_TPFLAGS_DEFAULT, tensor_slots};

/* ---- Gates ---- */

/* Never freed: a stream may still be about to read it. */
typedef struct {
  pthread_mutex_t mutex;
  pthread_cond_t changed;
  int open;
} Latch;

typedef struct {
  PyObject_HEAD Latch* latch;
} Gate;

static long late_count = 0;

static void pass(void* argument) {
  Latch* latch = argument;
  struct timespec end;
  clock_gettime(CLOCK_REALTIME, &end);
  end.tv_sec += GATE_SECONDS;
  pthread_mutex_lock(&latch->mutex);
  while (!latch->open) {
    if (pthread_cond_timedwait(&latch->changed, &latch->mutex, &end) != ETIMEDOUT) continue;
    if (!latch->open) __atomic_add_fetch(&late_count, 1, __ATOMIC_RELAXED);
    break;
  }
  pthread_mutex_unlock(&latch->mutex);
}

static int gate_init(PyObject* self, PyObject* args, PyObject* keywords) {
  static char* names[] = {NULL};
  if (!PyArg_ParseTupleAndKeywords(args, keywords, "", names)) return -1;
  Latch* latch = calloc(1, sizeof *latch);
  if (latch == NULL) {
    PyErr_NoMemory();
    return -1;
  }
  pthread_mutex_init(&latch->mutex, NULL);
  pthread_cond_init(&latch->changed, NULL);
  ((Gate*)self)->latch = latch;
  return 0;
}

static PyObject* gate_open(PyObject* self, PyObject* unused) {
  Latch* latch = ((Gate*)self)->latch;
  (void)unused;
  pthread_mutex_lock(&latch->mutex);
  latch->open = 1;
  pthread_cond_broadcast(&latch->changed);
  pthread_mutex_unlock(&latch->mutex);
  Py_RETURN_NONE;
}

static PyObject* gate_address(PyObject* self, void* unused) {
  (void)unused;
  return PyLong_FromVoidPtr(((Gate*)self)->latch);
}

static PyObject* gate_function(PyObject* self, void* unused) {
  (void)self;
  (void)unused;
  return PyLong_FromVoidPtr((void*)(uintptr_t)&pass);
}

static void gate_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(type);
}

static PyMethodDef gate_methods[] = {{"open", gate_open, METH_NOARGS, "Let the stream go on."}, {NULL, NULL, 0, NULL}};
static PyGetSetDef gate_fields[] = {{"address", gate_address, NULL, "The function's argument.", NULL},
                                    {"function", gate_function, NULL, "The function that waits.", NULL},
                                    {NULL, NULL, NULL, NULL, NULL}};
static PyType_Slot gate_slots[] = {{Py_tp_init, (void*)gate_init},
                                   {Py_tp_dealloc, (void*)gate_dealloc},
                                   {Py_tp_methods, gate_methods},
                                   {Py_tp_getset, gate_fields},
                                   {0, NULL}};
static PyType_Spec gate_spec = {"device_ext.Gate", sizeof(Gate), 0, Py_TPFLAGS_DEFAULT, gate_slots};

/* ---- The module ---- */

static PyObject* set_stream(PyObject* module, PyObject* handle) {
  (void)module;
  void* given = PyLong_AsVoidPtr(handle);
  if (given == NULL && PyErr_Occurred()) return NULL;
  stream = given;
  Py_RETURN_NONE;
}

static PyObject* late(PyObject* module, PyObject* unused) {
  (void)module;
  (void)unused;
  return PyLong_FromLong(__atomic_load_n(&late_count, __ATOMIC_RELAXED));
}

static PyMethodDef functions[] = {{"set_stream", set_stream, METH_O, "Choose the current stream."},
                                  {"late", late, METH_NOARGS, "Gates that opened themselves."},
                                  {NULL, NULL, 0, NULL}};
static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "device_ext", NULL, -1, functions, NULL, NULL, NULL, NULL};

static int add_type(PyObject* module, const char* name, PyType_Spec* spec, int exchanges) {
  PyObject* type = PyType_FromSpec(spec);
  int failed = type == NULL || PyObject_SetAttrString(module, name, type) < 0;
  if (!failed && exchanges) {
    PyObject* capsule = PyCapsule_New((void*)(uintptr_t)&api, "dlpack_exchange_api", NULL);
    failed = capsule == NULL || PyObject_SetAttrString(type, "__dlpack_c_exchange_api__", capsule) < 0;
    Py_XDECREF(capsule);
  }
  Py_XDECREF(type);
  return failed ? -1 : 0;
}

PyMODINIT_FUNC PyInit_device_ext(void) {
  PyObject* module = PyModule_Create(&definition);
  if (module == NULL) return NULL;
  if (add_type(module, "Tensor", &tensor_spec, 1) < 0 || add_type(module, "Gate", &gate_spec, 0) < 0) {
    Py_DECREF(module);
    return NULL;
  }
  return module;
}
